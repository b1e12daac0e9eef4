"""Buffers that a step changes from its samples, such as tokens that each expert has got.

Note [Counted buffers]: each replica adds to such a buffer what its own samples give, where one
process adds up all of them. A look at the step, on some samples and on their parts, tells which
buffers are sums over samples: those that the parts, one after the other, leave as the whole does,
and to which the same parts add the same once more, as they do not to a running maximum. What a step
then adds to them is summed over the replicas. Others, such as running means, are refused.

Note [Buffers of micro-batches]: a step runs once for each micro-batch, and on a rank with several
stages once for each of them, where one process runs it once. A look at the step, on some samples
and on their parts, tells what a buffer holds. What the parts leave, one after the other, as the
whole does, such as a sum or a maximum over samples, stays as it is. What one part changes as the
whole does, such as a count of steps, begins anew with each micro-batch. Others, such as running
means, are refused. What the stages of one rank change alike, the last of them changes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.collectives import all_reduce
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh

__all__ = ["CountedBuffers", "StageBuffers", "buffers_of", "put_buffers"]

_TOLERANCE = 1e-4
_OBSERVERS = "torch.ao."
"""Package of torch whose modules note the ranges of what passes through them."""


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that code of users' may change: norms over a batch and
    observers of torch have rules of their own, and some stand for the parameters of another stage.
    """
    return {
        f"{place}.{name}".removeprefix("."): buffer.detach().clone()
        for place, part in module.named_modules()
        if _is_users(part)
        for name, buffer in part.named_buffers(recurse=False)
        if not isinstance(buffer, DTensor) and not buffer.is_meta and name not in part._parameters
    }


def put_buffers(module: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Give a module these tensors as its buffers; those of another stage, and those that stand for
    a parameter of one, are left out.
    """
    for name, value in named.items():
        *place, own = name.split(".")
        part = module
        for word in place:
            part = part if isinstance(part, StageStub) else part.get_submodule(word)
        if not isinstance(part, StageStub) and own not in part._parameters:
            setattr(part, own, value)


def _is_users(part: nn.Module) -> bool:
    """Whether the buffers of a module are not those of a layer of torch's or of this package's.

    Classes made by FSDP are beside the user's; torch's containers have what the user gives them.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(part).__mro__}
    if not packages <= {"torch", "lightning_par", "builtins", "typing"}:
        return True
    has_own = hasattr(part, "running_mean") or type(part).__module__.startswith(_OBSERVERS)
    return "lightning_par" not in packages and not has_own


class CountedBuffers:
    """Sums what replicas add to buffers; see Note [Counted buffers].

    Args:
        module: The user's LightningModule on this rank.
        mesh: Its replicas see other samples.
        takes_parts: Whether statistics of a part of the samples are accepted.

    Attributes:
        is_known: Whether a look has told which buffers are summed.
        names: Those buffers.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, *, takes_parts: bool) -> None:
        self._module, self._mesh = module, mesh
        self.is_known = takes_parts or mesh.sizes.world_size == 1
        self.names: list[str] = []

    def learn(
        self,
        before: Mapping[str, Tensor],
        ends: Sequence[Mapping[str, Tensor]],
        again: Callable[[], Sequence[Mapping[str, Tensor]]],
        alone: Callable[[], Mapping[str, Tensor]],
        *,
        divides: bool = False,
    ) -> None:
        """Find the buffers that are sums over samples.

        Args:
            before: The buffers before the step.
            ends: Those after it on some samples, and after their parts, one after the other; empty
                if a look came to no end on this rank, so that no rank has learned anything.
            again: Runs the parts once more, after those, and gives the buffers after each.
            alone: Gives the buffers after the last part alone.
            divides: Whether a batch is cut into several micro-batches, each of which changes them.

        Raises:
            ConfigurationError: On all ranks, if there are others that samples change.

        **Communicates**: names and what changed, over all ranks; what `again` and `alone` do.
        """
        names = {name: None for held in (before, *ends) for name in held} if ends else {}
        found = {n: _change_of(before.get(n), [end.get(n) for end in ends]) for n in names}
        changed = {name: change for name, change in found.items() if change is not None}
        every: list[Any] = [None] * self._mesh.sizes.world_size
        stage = self._mesh.place["pp"]
        # Over the world: a buffer may be on one stage only, and all ranks have to decide alike.
        dist.all_gather_object(every, (bool(ends), stage, changed))
        if not all(is_seen for is_seen, _, _ in every):
            return
        self.is_known = True
        replica = [every[rank] for rank in dist.get_process_group_ranks(self._mesh.replica_group)]
        of_all = {
            name: [changes[name] for _, _, changes in every if name in changes]
            for name in sorted({name for _, _, changes in every for name in changes})
        }
        once = self._changed_once(of_all, changed, before, ends, alone)
        told, added = list[str](), list[str]()
        for name, changes in of_all.items():
            is_cut = not all(change.is_joined or change.is_once for change in changes)
            if not (divides and is_cut) and name in once:
                continue
            is_sum = all(change.is_joined and change.can_add for change in changes)
            is_refused = not (is_sum or self._mesh.sizes.data == 1) or (divides and is_cut)
            if is_refused or not _is_same_in_stages(name, replica):
                told.append(name)
            elif self._mesh.sizes.data > 1:
                added.append(name)
        self._refuse_any(told, divides)
        # `told` may differ by replica, but is empty everywhere after the refusal above. So
        # `added` is the same on all ranks, and all of them enter `again`, which communicates.
        if added:
            parts = [*ends, *again()]
            others = [n for n in added if n in changed and not _adds_again(n, before, parts)]
            self._refuse_any(others, divides)
        self.names = [name for name in added if name in before]

    def _changed_once(
        self,
        of_all: Mapping[str, Sequence["_Change"]],
        changed: Mapping[str, "_Change"],
        before: Mapping[str, Tensor],
        ends: Sequence[Mapping[str, Tensor]],
        alone: Callable[[], Mapping[str, Tensor]],
    ) -> set[str]:
        """Return the buffers that every part of the samples changes as the whole does.

        The first part does so to a maximum, too, if it has the largest sample; the last part alone
        then does not.
        """
        once = {name for name, changes in of_all.items() if all(c.is_once for c in changes)}
        doubtful = [n for n in once if not all(change.repeats for change in of_all[n])]
        if not doubtful or self._mesh.sizes.data == 1:
            return once
        held, others = alone(), set[str]()
        for name in changed.keys() & doubtful:
            tensors = before.get(name), ends[0].get(name), held.get(name)
            found = [_wide(tensor) for tensor in tensors if tensor is not None]
            if len(found) < 3 or len({tensor.shape for tensor in found}) > 1:
                continue  # it grows, as a cache does
            start, whole, end = found
            if not _is_near(_change(start, end), _change(start, whole)):
                others.add(name)
        return once - self._named_by_any(others)

    def _refuse_any(self, names: Sequence[str], divides: bool) -> None:
        """Refuse the buffers that any rank names."""
        told = sorted(self._named_by_any(names))
        if told:
            self._refuse(told, divides)

    def _named_by_any(self, names: Iterable[str]) -> set[str]:
        """Return the names that any rank gives."""
        every: list[Any] = [None] * self._mesh.sizes.world_size
        dist.all_gather_object(every, [*names])
        return set().union(*every)

    def _refuse(self, names: Sequence[str], divides: bool) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        part = "micro-batch and rank" if divides else "rank"
        alone = self._mesh.sizes.data == 1
        cure = "\n  - Or use num_microbatches=1." if divides and alone else ""
        raise ConfigurationError(
            "LP325",
            f"training_step changes the buffer {names[0]}{more} from its samples in a way that "
            "the mesh cannot compute.\n"
            f"Why: on {self._mesh.sizes} each {part} computes the buffer from its own "
            "samples or tokens, and these values cannot be combined into the value of a run on one "
            "process.\nWhat to write:\n  - Add the values of the samples to buffers (self.total += "
            "x.sum(); self.count += len(x)), since such sums are added over all samples, and "
            f"divide them in on_train_batch_end.{cure}\n  - If tensor parallelism divides the "
            "tokens, use sequence_parallel=False.\n  - To accept the value of each rank's own "
            "samples, as DDP does, declare ParallelPlan(batch=BatchLayout(local_statistics=True))."
            "\nNo weight was changed.",
        )

    @contextmanager
    def summed(self, step: str, *, fills: bool) -> Iterator[None]:
        """Surrounds a step; afterwards buffers have what all replicas have added.

        Args:
            step: Its name; others than `training_step` are left alone.
            fills: Whether the batch of this replica counts nowhere.

        **Communicates**: the buffers, over the replicas.
        """
        if not self.names or step != "training_step":
            yield
            return
        before = {name: self._module.get_buffer(name).clone() for name in self.names}
        yield
        with torch.no_grad():
            for name, value in before.items():
                buffer = self._module.get_buffer(name)
                if buffer.shape != value.shape:
                    raise ConfigurationError(
                        "LP325",
                        f"training_step changes the shape of the buffer {name} from "
                        f"{tuple(value.shape)} to {tuple(buffer.shape)}. So far it added values "
                        "of the samples to this buffer, which are summed over the replicas on "
                        f"{self._mesh.sizes}; buffers of a changed shape cannot be summed. Give "
                        "the buffer its largest shape in __init__.",
                    )
                added = torch.zeros_like(value) if fills else _change(value, buffer)
                # What was there before is the same on every replica: only what the step added is
                # summed.
                buffer.copy_(value + all_reduce(added, self._mesh.data_group))


@dataclass(frozen=True, kw_only=True)
class _Change:
    """What the step on some samples, and on their parts, does to a buffer.

    Attributes:
        is_once: Whether the first part changes it as the whole does, as a count of steps.
        repeats: Whether the last part changes it by as much again.
        is_joined: Whether the parts, one after the other, leave it as the whole does, as a sum.
        can_add: Whether its values can be added up.
        mark: A number of what the whole changes.
    """

    is_once: bool
    repeats: bool
    is_joined: bool
    can_add: bool
    mark: float


class StageBuffers:
    """Keeps buffers of a stage as one process would have them; see Note [Buffers of micro-batches].

    Args:
        module: The user's LightningModule, which holds the stages of this rank.
        counts: Gets what a look has found out.
        stages: Number of stages of this rank.
        divides: Whether a batch is cut into several micro-batches.

    Attributes:
        is_active: Whether `step` and `run` have to surround what runs.
    """

    def __init__(
        self, module: nn.Module, counts: CountedBuffers, *, stages: int, divides: bool
    ) -> None:
        self._module, self._counts = module, counts
        self._stages, self._divides = stages, divides
        self._once, self._repeated = frozenset[str](), frozenset[str]()
        self.is_active = False
        self._runs = Counter[int]()
        self._start: dict[str, Tensor] = {}
        self._parts = 0
        self._ends: dict[int, list[dict[str, Tensor]]] | None = None  # stage -> its runs, in a look

    @property
    def is_known(self) -> bool:
        """Whether no look has to tell anything any more."""
        return self._counts.is_known

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds the schedule of a training step."""
        names = self._once | self._repeated
        held = {name: self._module.get_buffer(name) for name in names}
        self._start = {name: buffer.clone() for name, buffer in held.items()}
        self._runs.clear()
        try:
            yield
        finally:
            for name, buffer in held.items():
                # The module gets back the tensor that it held, as others may hold the same one,
                # with the value that the last micro-batch left.
                with torch.no_grad():
                    buffer.copy_(self._module.get_buffer(name))
                put_buffers(self._module, {name: buffer})

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """Surrounds the user's step on a micro-batch, for one stage.

        Args:
            index: Of the micro-batch.
        """
        stage = self._runs[index]
        self._runs[index] += 1
        if self._ends is not None:
            ends = self._ends.setdefault(stage, [])
            if index > 2 * self._parts + 1:  # a round that looks at other values than buffers
                ends = []
            begin = self._begin_part(index, ends).items()
            put_buffers(self._module, {name: buffer.clone() for name, buffer in begin})
            try:
                yield
            finally:
                ends.append(buffers_of(self._module))
            return
        # New tensors: a backward that is to come may need those of earlier micro-batches.
        put_buffers(self._module, {name: self._start[name].clone() for name in self._once})
        kept = {}
        if stage < self._stages - 1:
            kept = {name: self._module.get_buffer(name) for name in self._repeated}
            put_buffers(self._module, {name: buffer.clone() for name, buffer in kept.items()})
        try:
            yield
        finally:
            put_buffers(self._module, kept)

    @contextmanager
    def look(self, parts: int) -> Iterator[None]:
        """Surrounds a look at the training step on some samples, on their parts, on the parts once
        more, and on the first of them again.

        Args:
            parts: Number of the parts.

        Raises:
            ConfigurationError: On all ranks, if a buffer is refused.

        **Communicates**: names and what changed, over all ranks.
        """
        self._start, self._ends, self._parts = buffers_of(self._module), {}, parts
        self.is_active = True
        self._runs.clear()
        try:
            yield
            self._learn(parts, self._ends)
        finally:
            self._ends = None
            self.is_active = bool(self._once | self._repeated)

    def _begin_part(self, index: int, ends: Sequence[dict[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return the buffers with which a look's run on a stage begins.

        Args:
            index: 0 for the whole, then those of the parts, see `look`.
            ends: The buffers after each run so far.
        """
        if index < 2 or not ends:
            return self._start
        if index > 2 * self._parts:
            return ends[-1]
        # A part sees a count of steps as the whole sees it, as every micro-batch will.
        changes = self._changes(ends[:2]).items()
        once = {name: self._start.get(name) for name, change in changes if change.is_once}
        return ends[-1] | {name: value for name, value in once.items() if value is not None}

    def _learn(self, parts: int, runs: Mapping[int, list[dict[str, Tensor]]]) -> None:
        before, ends = self._start, list[Mapping[str, Tensor]]()
        if len(runs) == self._stages and all(len(r) == 2 * parts + 2 for r in runs.values()):
            changed = {stage: self._changes(held[: parts + 1]) for stage, held in runs.items()}
            places = {name: stage for stage in sorted(changed) for name in changed[stage]}
            ends = [
                {name: runs[stage][at][name] for name, stage in places.items()}
                for at in range(2 * parts + 2)
            ]
            found = {name: changed[stage][name] for name, stage in places.items()}
            often = Counter(name for names in changed.values() for name in names)
            kept = {name for name in found if name in before}
            once = {name for name in kept if found[name].is_once}
            # What is set, as a flag, and a maximum do not change again; a count of steps does.
            last, again = ends[-2], ends.pop()
            self._once = frozenset(n for n in once if not torch.equal(last[n], again[n]))
            self._repeated = frozenset(n for n in kept - self._once if often[n] > 1)
        half = parts + 1
        # What the first part changes as the whole does began anew with the last one.
        alone, repeated = ends[parts] if ends else {}, ends[half:]
        given = before, ends[:half], lambda: repeated, lambda: alone
        self._counts.learn(*given, divides=self._divides)

    def _changes(self, ends: Sequence[dict[str, Tensor]]) -> dict[str, _Change]:
        names = {name: None for held in (self._start, *ends) for name in held}
        found = {n: _change_of(self._start.get(n), [end.get(n) for end in ends]) for n in names}
        return {name: change for name, change in found.items() if change is not None}


def _change_of(before: Tensor | None, ends: Sequence[Tensor | None]) -> _Change | None:
    """Return what a step does to a buffer; None if it does not change.

    Args:
        before: The buffer before the step; None: there was none.
        ends: As in `CountedBuffers.learn`.
    """
    if any(end is None or end.shape != ends[0].shape for end in ends):  # type: ignore[union-attr]
        return None  # it vanishes, or its shape is that of the samples: nothing is added up in it
    is_new = before is None or before.shape != ends[0].shape  # type: ignore[union-attr]
    # What is new, as a cache that grows, changes from nothing.
    start: Tensor = torch.zeros_like(ends[0]) if is_new else before  # type: ignore[arg-type, assignment]
    whole, *parts = [_change(_wide(start), _wide(end)) for end in ends]  # type: ignore[arg-type]
    if not bool(whole.any()):
        return None
    # Weighted by place, so that two buffers whose entries are permuted do not look alike.
    places = torch.arange(1, whole.numel() + 1, dtype=whole.dtype, device=whole.device)
    return _Change(
        is_once=bool(parts) and _is_near(parts[0], whole),
        repeats=len(parts) > 1 and _is_near(_change(parts[-2], parts[-1]), whole),
        is_joined=bool(parts) and _is_near(parts[-1], whole),
        can_add=not is_new and start.dtype != torch.bool,
        mark=float((_finite(whole).flatten() * places).sum()),
    )


def _is_same_in_stages(name: str, replica: Sequence[tuple[bool, int, Any]]) -> bool:
    """Whether a buffer changes alike on all ranks of a stage, which see the same samples.

    Args:
        name: Of the buffer.
        replica: Of each rank of a replica: whether it has looked, its stage, and what changed.
    """
    marks: dict[int, list[float]] = {}
    for _, stage, changes in replica:
        marks.setdefault(stage, []).append(changes[name].mark if name in changes else 0.0)
    return all(
        math.isclose(mark, held[0], rel_tol=_TOLERANCE) for held in marks.values() for mark in held
    )


def _adds_again(
    name: str, before: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]]
) -> bool:
    """Whether parts add the same to a buffer when they come once more.

    Args:
        name: Of the buffer.
        before: The buffers before the step.
        ends: Those after it on the whole, and, one after the other, on the parts, twice.
    """
    start, whole = before.get(name), ends[0].get(name)
    held = [start, *(end.get(name) for end in ends[1:])]
    if whole is None or any(value is None or value.shape != whole.shape for value in held):
        return False
    values = [_wide(value) for value in held if value is not None]
    changes = [_change(one, other) for one, other in pairwise(values)]
    half = len(changes) // 2
    largest = _change(values[0], _wide(whole))
    return all(
        _is_near(other, one, largest)
        for one, other in zip(changes[:half], changes[half:], strict=True)
    )


def _change(before: Tensor, end: Tensor) -> Tensor:
    """Return what was added to a buffer: nothing where it is as before, also infinite or NaN."""
    is_same = (end == before) | ((end != end) & (before != before))
    return torch.where(is_same, 0, end - before)


def _is_near(change: Tensor, whole: Tensor, scale: Tensor | None = None) -> bool:
    largest = _finite(whole if scale is None else scale).abs().max()
    return bool((_change(whole, change).abs() <= _TOLERANCE * largest).all())


def _wide(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
