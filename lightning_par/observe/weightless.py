"""Tensors without memory: a run computes shapes where tensors are large, and values elsewhere.

Note [Two kinds of tensors]: weights, activations and gradients are fake tensors of torch, which
have a shape, a dtype and a device, and no memory. What is small, or no floating-point number, is
real: batches, counts of labels, random states, pickled objects, norms. So everything that a run
decides on the host it decides as always. Where a value would come out of fake tensors, one stands
in that lets a healthy run go on: scalars are 1, flags of trouble ("any") are off, and choices
(top-k, argmax) are even: entry i is i modulo the number of choices.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_par.checkpoint.progress import advance
from lightning_par.observe.collective_hooks import report_functional
from lightning_par.observe.known_results import KnownResults
from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.upstream.dispatch import FakeTensorMode, item_operator, operator_schema
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import map_leaves

__all__ = ["WeightlessTensors"]

_SMALL = 4096
"""Floating-point tensors that are made with at most as many entries are real."""
_SMALL_COUNTS = 2**26
"""Likewise of integers and flags."""
_NO_TROUBLE = ("any", "isnan", "isinf", "_is_any_true")
_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default)
_device = torch.ops.prim.device.default


class WeightlessTensors(LiveBytes):
    """Context in which large tensors have no memory; see Note [Two kinds of tensors].

    Counts the bytes that they would take, with those of the small ones.

    Args:
        besides: A nest of tensors that do not count.
    """

    def __init__(self, besides: Any = ()) -> None:
        super().__init__(besides)
        # Real tensors may take part, as small ones here are real.
        self._fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake = type(self._fakes.from_tensor(torch.empty(1)))
        self._known = KnownResults(self._fakes, self._fake)
        self._pauses = self._asides = 0

    @override
    def __enter__(self) -> Self:
        # Selective checkpointing passes every question for a device on, which takes long.
        # Their classes are private to torch, but made by this function.
        for mode in {type(each) for each in create_selective_checkpoint_contexts([])}:
            self._open.enter_context(
                replaced(mode, "__torch_dispatch__", _with_devices(mode.__torch_dispatch__))
            )
        return super().__enter__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, new tensors have memory; operations on fake ones stay without."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, tensors do not count: those that another rank would have."""
        self._asides += 1
        try:
            yield
        finally:
            self._asides -= 1

    def _answer(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device and isinstance(args[0], self._fake):  # by far the most frequent call
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its parts come here one by one
        advance("operations")
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        _gather_tensors(args, tensors)
        if kwargs:
            _gather_tensors(tuple(kwargs.values()), tensors)
        if func is item_operator and not tensors:
            return args[0]  # torch gives the tensor of a Python number as the number
        fakes: list[Any] = [t for t in tensors if isinstance(t, self._fake)]
        # DTensor's sharding propagation runs operations in a fake mode of its own.
        foreign = [t for t in fakes if t.fake_mode is not self._fakes]
        if foreign:  # DTensor finds out shapes; they take no memory in the run either
            with self._fakes if len(foreign) < len(fakes) else nullcontext():
                return func(*args, **kwargs)
        if fakes:
            out = self._without_values(func, args, kwargs, tensors)
        # A factory function (`empty`, `randn`): only here is there a choice of the kind.
        elif not tensors and not self._pauses:
            out = self._make(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self.count(out)
        return out

    @override
    def _has_memory(self, tensor: Tensor) -> bool:
        if self._asides:
            return False
        # A fake tensor has no bytes, but those that it would have count.
        if isinstance(tensor, self._fake):
            return tensor.device.type != "meta"
        return super()._has_memory(tensor)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that makes a tensor from nothing."""
        # Made without memory first: its size says whether it may be real.
        with self._fakes:
            out = func(*args, **kwargs)
        # On meta it has no memory either way.
        if not isinstance(out, Tensor) or out.device.type == "meta":
            return func(*args, **kwargs)
        limit = _SMALL if out.is_floating_point() else _SMALL_COUNTS
        if out.numel() > limit:
            return out
        # Run once more, for real. The fake one has drawn no random number.
        made = func(*args, **kwargs)
        # What nothing is received into has to be finite.
        return made.zero_() if func in _EMPTY and out.is_floating_point() else made

    def _without_values(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        # Python wants a number: see Note [Two kinds of tensors].
        if func is item_operator:
            return self._scalar(func, args[0]).item()
        # The group counts the call and matches it with those of other ranks; it has no bytes to
        # move.
        if func.namespace == "c10d":
            return _communicate(func, args, kwargs)
        # The number of entries that a mask chooses depends on values, which the real mask has.
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            args = (args[0], _places(args[1]), *args[2:])
        out = self._known.of(func, args, kwargs, partial(self._compute_shapes, func, args, kwargs))
        # No device's kernel ran, in which a hook would have seen it.
        if func.namespace == "_c10d_functional":
            report_functional(operator_schema(func).name.rpartition("::")[2], args, out)
            return out
        # A view, or what was written in place, stays the tensor that it is.
        if _gives_new(func):
            choices = partial(_choices, func, args, kwargs, tensors[0])
            out = map_leaves(lambda t: self._value(func, t, choices), out)
        return out

    def _compute_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors; real ones take part with their shapes."""
        stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

        def without_values(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, self._fake):
                return leaf
            fake = torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )
            # The fake is kept, or its id might be given to the next one.
            stand_ins[id(fake)] = fake, leaf
            return fake

        with self._fakes:
            out = func(*map_leaves(without_values, args), **map_leaves(without_values, kwargs))
        # What is changed in place is the tensor that was given.
        return map_leaves(lambda t: stand_ins[id(t)][1] if id(t) in stand_ins else t, out)

    def _value(self, func: Any, leaf: Any, choices: Callable[[], int]) -> Any:
        """Return what stands in for a result: real values for scalars and choices."""
        if not isinstance(leaf, self._fake) or leaf.device.type == "meta":
            return leaf
        if leaf.ndim == 0:
            return self._scalar(func, leaf)
        if leaf.dtype == torch.int64 and leaf.numel() <= _SMALL_COUNTS:
            # Indices have to be within bounds for what comes next (a gather, an embedding).
            return (torch.arange(leaf.numel()) % choices()).view(leaf.shape)
        return leaf

    def _scalar(self, func: Any, like: Tensor) -> Tensor:
        name = operator_schema(func).name.rpartition("::")[2]
        return torch.full((), 0 if name in _NO_TROUBLE else 1, dtype=like.dtype)


def _with_devices(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a mode that answers for the devices of tensors itself."""
    inner = inspect.unwrap(dispatch)  # without what keeps torch's compiler away

    def answer(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].device if func is _device else inner(mode, func, types, args, kwargs)

    return answer


# Of a method that a class is made with torch keeps its compiler away, which takes longer than the
# method; nothing is compiled in a rehearsal.
WeightlessTensors.__torch_dispatch__ = WeightlessTensors._answer  # type: ignore[assignment, method-assign]


def _gather_tensors(values: Any, into: list[Tensor]) -> None:
    """Append the tensors among arguments; pytrees, which know more kinds, take far longer."""
    for value in values:
        # Tensors among arguments of operators are in lists at most.
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, list | tuple):
            _gather_tensors(value, into)


@cache
def _gives_new(func: Any) -> bool:
    """Tell whether an operation changes no argument, and returns no view of one."""
    return all(argument.alias_info is None for argument in operator_schema(func).arguments)


def _choices(func: Any, args: Any, kwargs: Any, source: Tensor) -> int:
    """Return the number of choices along the dim of an operation that may choose."""
    names = [argument.name for argument in operator_schema(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # top-k and argmax choose along their `dim`, by default the last.
    dim = given.get("dim")
    return max(1, source.shape[dim if isinstance(dim, int) else -1]) if source.ndim else 1


def _places(indices: Any) -> list[Any]:
    """Return indices with the numbers of what masks choose, which fake tensors cannot tell."""
    found: list[Any] = []
    for index in indices:
        masks = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero(as_tuple=True) if masks else [index]
    return found


def _communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """Let the process group have the call, with empty tensors: it has nothing to send."""
    originals: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # On the CPU, whatever the device: nothing is sent.
        stand_in = torch.empty(0, dtype=leaf.dtype)
        originals[id(stand_in)] = stand_in, leaf
        return stand_in

    out = func(*map_leaves(empty, args), **map_leaves(empty, kwargs))
    return map_leaves(lambda t: originals[id(t)][1] if isinstance(t, Tensor) else t, out)
