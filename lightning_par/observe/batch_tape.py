"""How a step computes tensors from its batch alone, recorded so that it can be done again.

Labels that a step masks by itself (``labels[mask == 0] = -100``), or a number that it divides by
(``mask.sum()``), weigh the parts of a batch in its loss. `BatchTape` records the calls that make
them from entries of the batch, in one run of the step; `TapedTensor` makes the same tensor from
another batch, without the model.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import memory_key, written_by

__all__ = ["BatchTape", "TapedTensor"]

_VALUES = frozenset(
    {"__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"}
    | {"allclose", "equal", "is_nonzero", "item", "numpy", "tolist"}
)
"""Functions of a tensor that return a value of it to Python."""
_MOVES = frozenset(
    {"__getitem__", "chunk", "clone", "contiguous", "cpu", "cuda", "detach", "flatten", "int"}
    | {"long", "narrow", "reshape", "split", "squeeze", "t", "to", "transpose", "unbind"}
    | {"unsqueeze", "view"}
)
"""Functions that leave values as they are."""
_BOUNDS = frozenset(("clamp", "clamp_", "clamp_min", "clamp_min_"))
_MODULE_FILE = inspect.getfile(nn.Module)


@dataclass(frozen=True)
class _Made:
    """Stands for a tensor of the tape, by its number."""

    number: int


@dataclass(frozen=True)
class _Length:
    """Stands for a length of a tensor of the batch, or its number of entries; it was `value`."""

    entry: int
    dim: int | None
    value: int


@dataclass(frozen=True)
class _Slice:
    """Stands for a slice."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class _Device:
    """Stands for the device of the batch."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the tape.

    Attributes:
        function: What was called.
        given: Its arguments and keyword arguments.
        results: Numbers of the tensors that it returned.
        written: Number of the tensor that it wrote to.
        inside: Whether a submodule made the call.
    """

    function: Callable[..., Any]
    given: Any
    results: tuple[int, ...]
    written: int | None
    inside: bool


@dataclass(frozen=True, eq=False)
class TapedTensor:
    """A tensor that a step makes of its batch alone. It can be pickled.

    Attributes:
        entries: Numbers of the tensors of the batch that it is made of, as `tensors_of` gives them.
        kinds: Number of dims and dtype of every tensor of the batch.
        follows: Dims of the batch whose lengths the whole numbers of the calls follow where they
            were equal (None: numbers of entries); others stay as they were. A number may equal a
            length by chance.
    """

    entries: tuple[int, ...]
    calls: tuple[_Call, ...]
    number: int
    kinds: tuple[tuple[int, torch.dtype], ...]
    follows: Callable[[int | None], bool] = bool

    @property
    def only_moves(self) -> bool:
        """Whether its values are those of the batch as they are."""
        return all(getattr(call.function, "__name__", "") in _MOVES for call in self.calls)

    def takes(self, batch: Any) -> bool:
        """Return whether a batch has the tensors of the one that was recorded, of any lengths."""
        return _kinds_of(tensors_of(batch)) == self.kinds

    def variants(self) -> "list[TapedTensor]":
        """Return the ways in which the numbers of the calls may follow the lengths of a batch."""
        return [replace(self, follows=follows) for follows in (_any_dim, bool, _no_dim)]

    def make(self, batch: Any) -> Tensor:
        """Return the tensor that the step would make of a batch, on the device of the batch.

        Args:
            batch: With the entries of the one that was recorded.

        Raises:
            Exception: Of torch, if the batch has other entries than the one that was recorded.
        """
        given = list(tensors_of(batch))
        # Copies, as the step may write into its batch.
        made = {entry: given[entry].clone() for entry in self.entries}

        def value(held: Any) -> Any:
            if isinstance(held, _Made):
                return made[held.number]
            if isinstance(held, _Slice):
                return slice(*map(value, held.parts))
            if isinstance(held, _Length):
                entry = given[held.entry]
                length = entry.numel() if held.dim is None else entry.shape[held.dim]
                return length if self.follows(held.dim) else held.value
            return given[0].device if isinstance(held, _Device) else held

        with torch.no_grad():
            for call in self.calls:
                args, kwargs = map_leaves(value, call.given)
                results = _tensors_in(call.function(*args, **kwargs))
                made.update(zip(call.results, results, strict=True))
        return made[self.number]


class BatchTape:
    """Records the calls of a step on one batch all of whose tensors come from the batch.

    What draws random numbers is not recorded. Once a value was read (``if mask.any():``), nothing
    is told any more, as the step may go on in another way for another batch.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._entries = list(tensors_of(batch))
        self._calls = list[_Call]()
        # The tensors are held, so that no other one can get the same `id`.
        self._held = [*self._entries]
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._entries)}
        self._is_open, self._is_open_inside = True, True
        self._depth = _submodules()

    def note(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], got: Any
    ) -> None:
        """Record a call of the step, if it belongs to the tape; `got` is what it returned."""
        if not self._is_open:
            return
        name = getattr(function, "__name__", "")
        # `mask.to(losses)`: of a tensor that is not made of the batch only the dtype is used.
        if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
            function, args = Tensor.to, (args[0], args[1].dtype, *args[2:])
        target = written_by(name, args, kwargs)
        written = None if target is None else self._number_of(target)
        given = _tensors_in((args, kwargs))
        belongs = all(self._number_of(tensor) is not None for tensor in given)
        made = _tensors_in(got) if belongs else []
        if not belongs or not (given or made) or _draws(name):
            # What it writes to is no longer made of the batch, nor what shares that memory.
            self._is_open &= written is None
        elif made or target is not None:
            if name == "__get__":  # a property, such as `mask.T`: its function cannot be pickled
                function = attrgetter(function.__self__.__name__)  # type: ignore[attr-defined]
            stand_ins = map_leaves(self._stand_in, (tuple(args), dict(kwargs)))
            results = tuple(self._number_of(tensor, adds=True) or 0 for tensor in made)
            inside = _submodules() > self._depth
            self._calls.append(_Call(function, stand_ins, results, written, inside))
        elif name in _VALUES:
            # What a submodule reads changes no more than what the submodule returns.
            self._is_open_inside = False
            self._is_open &= _submodules() > self._depth

    def of(self, tensor: Tensor, *, is_bounded: bool = True) -> TapedTensor | None:
        """Return how a tensor was made of the batch; None if it was not, or not of it alone.

        Args:
            tensor: One that a noted call took.
            is_bounded: Whether to keep a bound at its end (``count.clamp(min=1)``).
        """
        number = self._number_of(tensor)
        if number is None or not self._is_open:
            return None
        needed, calls, memory = {number}, list[_Call](), {memory_key(tensor)}
        for call in reversed(self._calls):
            writes = call.written is not None and memory_key(self._held[call.written]) in memory
            if not writes and needed.isdisjoint(call.results):
                continue
            taken = [held.number for held in leaves_of(call.given) if isinstance(held, _Made)]
            if not calls and not is_bounded and getattr(call.function, "__name__", "") in _BOUNDS:
                return self.of(self._held[taken[0]], is_bounded=call.written is not None)
            calls.append(call)
            needed.update(taken)
            memory |= {memory_key(self._held[each]) for each in taken}
        if any(call.inside for call in calls) and not self._is_open_inside:
            return None
        entries = tuple(sorted(each for each in needed if each < len(self._entries)))
        if not entries:
            return None
        return TapedTensor(entries, tuple(reversed(calls)), number, _kinds_of(self._entries))

    def _number_of(self, tensor: Tensor, *, adds: bool = False) -> int | None:
        number = self._numbers.get(id(tensor))
        if number is None:
            # The step may get other tensors than the batch holds, over the same memory.
            same = (held for held in self._entries if _is_same(held, tensor))
            number = self._numbers.get(id(next(same, None)))
        if number is None and adds:
            number = self._numbers[id(tensor)] = len(self._held)
            self._held.append(tensor)
        return number

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Made(self._number_of(value) or 0)
        if isinstance(value, slice):
            return _Slice(tuple(map(self._stand_in, (value.start, value.stop, value.step))))
        if isinstance(value, torch.device):
            return _Device()
        if type(value) is int and value > 1:
            for entry, tensor in enumerate(self._entries):
                # From the last one: a batch may have as many samples as tokens.
                for dim in reversed(range(tensor.ndim)):
                    if tensor.shape[dim] == value:
                        return _Length(entry, dim, value)
            for entry, tensor in enumerate(self._entries):
                if tensor.numel() == value:
                    return _Length(entry, None, value)
        return value


def _kinds_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((tensor.ndim, tensor.dtype) for tensor in tensors)


def _any_dim(_: int | None) -> bool:
    return True


def _no_dim(_: int | None) -> bool:
    return False


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _is_same(one: Tensor, other: Tensor) -> bool:
    if type(other) is not Tensor or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


@cache
def _draws(name: str) -> bool:
    """Whether a function of torch with this name draws random numbers."""
    packet: Any = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if hasattr(packet, "overloads") else ()
    overloads = [getattr(packet, each) for each in names]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _submodules() -> int:
    """Return how many calls of modules are running."""
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_code.co_filename == _MODULE_FILE
        frame = frame.f_back  # type: ignore[assignment]
    return count
