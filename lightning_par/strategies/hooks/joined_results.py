"""What a step returned, as hooks of a user's see it on several replicas: that of the global batch.

A number is the mean or the sum of those of the replicas, as the look at the step has told it; the
loss is joined by its rule. What has a dim for the samples stays that of the replica's own, as the
batch is.
"""

import copy
import dis
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_par.mesh import ParallelMesh
from lightning_par.observe.contents import names_in
from lightning_par.strategies.step.batch_weights import BatchWeigher, weigh
from lightning_par.strategies.step.returned import returned_numbers, warn_of_results

__all__ = ["OF_RESULTS", "JoinedResults", "reads_argument"]

OF_RESULTS = {
    "on_before_backward": "training_step",
    "on_train_batch_end": "training_step",
    "on_validation_batch_end": "validation_step",
    "on_test_batch_end": "test_step",
}
"""Hook -> the step of which it gets the loss, or what it returned."""
_JOINS = frozenset({"all_gather", "all_gather_object", "all_reduce", "gather_object", "reduce"})


def reads_argument(method: Any, index: int) -> bool:
    """Return whether the code of a function uses an argument.

    Args:
        method: It, perhaps bound or decorated.
        index: Number of the argument, without ``self``.
    """
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return False
    index += inspect.ismethod(method)
    # Beyond the positional ones it is in `*args`, whose name follows those that are keywords.
    place = index if index < code.co_argcount else code.co_argcount + code.co_kwonlyargcount
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    if index >= code.co_argcount and not has_rest:
        return False
    name = code.co_varnames[place]
    for made in dis.get_instructions(code):
        names = made.argval if isinstance(made.argval, tuple) else (made.argval,)
        if "LOAD" in made.opname and name in names:
            return True
    return False


class JoinedResults:
    """Joins what steps return over the replicas, for hooks that read it.

    Args:
        mesh: Its replicas see other samples, and its context ranks other tokens.
        weigher: Knows what the batch of each weighed in the last step.
        device: Of this rank.
        readers: Step -> hooks of a user's that read what it returned.
        left_alone: Steps of which nothing is joined, as they run their own backwards.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        weigher: BatchWeigher,
        device: torch.device,
        readers: Mapping[str, Sequence[Any]],
        left_alone: Collection[str] = (),
    ) -> None:
        self._mesh, self._weigher, self._device = mesh, weigher, device
        self._readers, self._left_alone = readers, left_alone
        self._names: dict[str, list[str]] = {}
        self._last: tuple[Any, Any, Any] = (None, None, None)  # result, weights, joined result

    def of_batch(self, step: str, result: Any) -> Any:
        """Return what a step returned, with the numbers of the global batch.

        Args:
            step: Its name.
            result: Of the samples of this replica; it stays as it is.

        **Communicates**: two numbers for each over the replicas; in the first step their names.
        """
        # Callbacks and the module get the same one; a step may return one object for each batch.
        if result is self._last[0] and self._weigher.last is self._last[1]:
            return self._last[2]
        numbers = _numbers(step, result)
        if step not in self._names:
            own = [] if step in self._left_alone else [*numbers]
            every: list[Any] = [own] * self._mesh.data_group.size()
            dist.all_gather_object(every, own, group=self._mesh.data_group)
            # These in every step, as replicas have to send alike, whatever a step returns.
            self._names[step] = [n for n in every[0] if all(n in names for names in every)]
            self._warn_of_own(step, result, numbers)
        joined = result
        if names := self._names[step]:
            joined = _replaced(result, f"{step}()", self._join(names, numbers))
        self._last = result, self._weigher.last, joined
        return joined

    def is_left_alone(self, step: str) -> bool:
        """Return whether a step has losses of its own backwards, of which no rule is known."""
        return step in self._left_alone

    @contextmanager
    def shown_in(self, loss: Tensor) -> Iterator[None]:
        """Give a loss, inside, the value of that of the global batch; its graph stays.

        **Communicates**: two numbers over the replicas.
        """
        own = loss.detach().clone()
        joined = self._join([_LOSS], {_LOSS: own})[_LOSS].to(own.dtype).reshape(own.shape)
        # By `data`: autograd must not notice. What a hook has changed in place stays changed.
        loss.data.copy_(joined)
        try:
            yield
        finally:
            is_kept = (loss.detach() == joined) | loss.detach().isnan()
            loss.data.copy_(torch.where(is_kept, own, loss.detach()))

    def _join(self, names: Sequence[str], numbers: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the numbers of the global batch: means, or sums where those of parts are added."""
        weights, sums = self._weigher.last, self._weigher.sums
        assert weights is not None
        is_divided = weights.context_group is not None
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        samples = nothing + (0 if weights.fills else sum(weights.sizes))
        adds = {n: weights.is_sum if n == _LOSS else n in sums and not is_divided for n in names}
        values, counts = list[Tensor](), list[Tensor]()
        for name in names:
            own, weight = numbers.get(name), weights.own.double()
            if adds[name]:
                weight = nothing + (not weights.fills)
            elif weights.is_sum or name in self._weigher.by_samples:
                weight = samples
            weight = nothing if own is None else weight.to(self._device)
            value = own.detach().double().reshape(()) if isinstance(own, Tensor) else nothing
            value = value + own if isinstance(own, int | float) else value
            values.append(weigh(value.to(self._device), weight))
            counts.append(weight)
        found = torch.stack([*values, *counts])
        # Context ranks that see whole sequences have the same numbers.
        dist.all_reduce(
            found, group=self._mesh.token_group if is_divided else self._mesh.data_group
        )
        pairs = zip(names, *(half.unbind() for half in found.chunk(2)), strict=True)
        # What is whole has no mean: it is a count, or the same for all.
        return {
            name: total if adds[name] else total / count
            for name, total, count in pairs
            if adds[name] or not _is_whole(numbers.get(name))
        }

    def _warn_of_own(self, step: str, result: Any, numbers: Mapping[str, Any]) -> None:
        """Warn, once, of what hooks read and get of the samples of one replica alone."""
        hooks, known = self._readers[step], self._weigher.sums | self._weigher.judged
        if all(names_in(hook) & _JOINS for hook in hooks):
            return
        texts = {text for hook in hooks for text in _texts_in(hook)}
        own = [name for name, key in _with_dims(result, f"{step}()") if key in {None, *texts}]
        own += numbers if step in self._left_alone else ()
        if own:
            rank_zero_warn(
                f"hooks read {', '.join(own)}, which {step} returns. On each of "
                f"{self._mesh.sizes.data} replicas these values are computed from the samples of "
                "this replica only. A run on one process computes them from all samples. Gather "
                "the values in the hook with self.all_gather on every rank, or log the results in "
                "the step with sync_dist=True."
            )
        if step not in self._left_alone:
            whole = {name for name, value in numbers.items() if _is_whole(value) and name != _LOSS}
            warn_of_results({name for name in whole - known if _is_asked(numbers[name])})


_LOSS = "training_step()['loss']"


def _numbers(step: str, result: Any) -> dict[str, Any]:
    """Return the numbers in what a hook gets of a step."""
    numbers = {call.name: call.value for call in returned_numbers(step, result)}
    loss = result.get("loss") if isinstance(result, Mapping) else None
    if step == "training_step" and isinstance(loss, Tensor) and loss.numel() == 1:
        numbers[_LOSS] = loss
    return numbers


def _is_whole(value: Any) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, int)


def _is_asked(value: Any) -> bool:
    # As `counts_in`: an integer 0 is the same as a sum and as a mean.
    return isinstance(value, Tensor) or bool(value)


def _with_dims(value: Any, name: str, key: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield the names of tensors with dims, and of lists, each with the key that leads to it."""
    if isinstance(value, Mapping | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _with_dims(entry, f"{name}[{key!r}]", key)
    elif (isinstance(value, Tensor) and value.numel() > 1) or (isinstance(value, list) and value):
        yield name, key


def _texts_in(function: Any) -> Iterator[Any]:
    """Yield the constants in the code of a function: keys of what it reads."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
            yield from (c for c in code.co_consts if isinstance(c, str | int))


def _replaced(value: Any, name: str, totals: Mapping[str, Tensor]) -> Any:
    """Return what a step returned with other numbers; containers are copies where one is in them.

    Args:
        value: It, or an entry.
        name: Of it, as `returned_numbers` has it.
        totals: Name of a number -> its new value.
    """
    if name in totals:
        total = totals[name]
        if isinstance(value, Tensor):
            return total.to(value.device, value.dtype).reshape(value.shape)
        return type(value)(round(float(total)) if isinstance(value, int) else float(total))
    if isinstance(value, Mapping):
        new = {key: _replaced(entry, f"{name}[{key!r}]", totals) for key, entry in value.items()}
        changed = {key: entry for key, entry in new.items() if entry is not value[key]}
        if changed:
            value = copy.copy(value)
            for key, entry in changed.items():
                value[key] = entry
    elif isinstance(value, tuple):
        parts = [_replaced(part, f"{name}[{i!r}]", totals) for i, part in enumerate(value)]
        # A namedtuple takes its fields one by one, a tuple as one iterable.
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
