"""A tape of what a constructor does to tensors, from which single tensors can be made later.

Note [Buffers of the tape]. The unit of the tape is a *buffer*: one storage, whatever views of it
exist. An entry says which buffers it reads and writes, and refers to tensors by buffer and
geometry, so that an operation on a slice, a transpose or ``.data`` of a parameter needs no case of
its own. What one buffer needs is found by walking the tape backwards from it.

Note [Seeds of draws]. A random draw that ends in one parameter only is seeded by that parameter's
name. A draw that ends in several (a layer that is copied, a parameter computed from another one) is
seeded by its number on the tape, so that all of them see the same values. Neither depends on what
else a rank makes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.errors import PlanError
from lightning_par.upstream.dispatch import item_operator, operator_schema, TorchDispatchMode
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import storage_key

__all__ = ["ConstructionTape", "TapeEntry", "TensorView"]

_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor as the tape refers to it: a buffer, and how the tensor lies in it (in elements)."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, held: Tensor) -> Tensor:
        """Return this view of the memory of a tensor.

        Args:
            held: Any view of the buffer.
        """
        # The usual case; as_strided keeps the dtype.
        if held.dtype == self.dtype:
            return held.as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=held.device)
        return empty.set_(held.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, kw_only=True)
class TapeEntry:
    """One operation.

    Attributes:
        function: What ran.
        args: Its arguments, tensors as `TensorView`.
        kwargs: Its keyword arguments, likewise.
        outputs: The new tensors among its flattened results; None for the others.
        reads: Buffers of the arguments.
        writes: Buffers that it made or changed in place.
        random: Whether it draws random numbers.
        default_dtype: The default dtype when it ran.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorView | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    random: bool
    default_dtype: torch.dtype

    @property
    def allocates(self) -> bool:
        """Whether it only allocates, so that the values are whatever was in memory."""
        return self.function in _EMPTY


def _is_written(declared: Any) -> bool:
    # Of the operator's schema: `a!` marks what is written in place.
    return declared.alias_info is not None and declared.alias_info.is_write


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that an operator writes to."""
    arguments = enumerate(operator_schema(func).arguments)
    return [(place, each.name) for place, each in arguments if _is_written(each)]


@cache
def _returned(func: Any) -> tuple[int, bool]:
    """Return how many results an operator has, and whether they are what it writes to."""
    returns = operator_schema(func).returns
    return len(returns), all(map(_is_written, returns))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    given = (args[i] if i < len(args) else kwargs.get(n) for i, n in _written_arguments(func))
    return [t for value in given for t in leaves_of(value) if isinstance(t, Tensor)]


class ConstructionTape(TorchDispatchMode):
    """Records while it is entered. Operations on meta tensors run on meta; others really run.

    Attributes:
        entries: The operations in order; after `finish` only those that a parameter needs.
        labels: Buffer -> how messages name the parameter that it became.
        shared: id of an entry that draws for several tensors -> its number among those.
        leaked: ids of entries whose draw also lives on in a real tensor (a buffer of the model).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[TapeEntry] = []
        self.labels: dict[int, str] = {}
        self.shared: dict[int, int] = {}
        self.leaked: set[int] = set()
        self._writers: dict[int, list[int]] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._constants: dict[int, Tensor] = {}
        self._real: dict[int, StorageWeakRef] = {}
        self._count = 0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations without recording them."""
        # Modes of functions see what the user's code calls, not each question of the tape.
        with replaced(self, "_paused", True), torch.DisableTorchFunction():
            yield

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether the tape has met the storage of `tensor`."""
        return storage_key(tensor.untyped_storage()) in self._storages

    def view(self, tensor: Tensor) -> TensorView:
        """Return how the tape refers to `tensor`, a new buffer if it has not met its storage."""
        return self._view(tensor)[0]

    def _view(self, tensor: Tensor) -> tuple[TensorView, bool]:
        """Return the view, and whether the tape had met its storage."""
        storage = tensor.untyped_storage()
        # A storage is a buffer, whatever views of it come.
        found = self._storages.get(storage_key(storage))
        buffer = self._count if found is None else found[1]
        if found is None:
            reference = self._name(storage, buffer)
            if not tensor.is_meta:
                self._real[buffer] = reference
            self._count += 1
        view = TensorView(
            buffer=buffer,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
        )
        return view, found is not None

    def _name(self, storage: torch.UntypedStorage, buffer: int) -> StorageWeakRef:
        # Weakly: a key may be given to another storage once this one is freed.
        reference = StorageWeakRef(storage)
        self._storages[storage_key(storage)] = (reference, buffer)
        return reference

    def adopt(self, tensor: Tensor, label: str) -> Tensor:
        """Return a meta tensor that stands for `tensor`: one history from now on.

        Called while the tape is `paused`, without gradients.

        Args:
            tensor: A parameter about to be registered; real or meta.
            label: How messages name it.
        """
        view = self._input(tensor)
        self.labels.setdefault(view.buffer, label)
        if tensor.is_meta:
            return tensor
        held = tensor.untyped_storage().nbytes()
        twin = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta")
        base = twin
        # The base has as many bytes as the real storage, so that views keep their geometry.
        if view.offset or twin.untyped_storage().nbytes() != held:
            base = torch.empty(held // tensor.element_size(), dtype=view.dtype, device="meta")
            twin = base.as_strided(view.size, view.stride, view.offset)
        self._name(base.untyped_storage(), view.buffer)
        return twin

    def _input(self, tensor: Tensor) -> TensorView:
        """Like `view`; the present values of a real tensor that the tape has not met are kept."""
        view, met = self._view(tensor)
        if not met and not tensor.is_meta:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            # Its bytes, not a copy: copied before the first write, see `_keep_before_write`.
            self._constants[view.buffer] = flat.set_(tensor.untyped_storage())
        return view

    def record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        written: Sequence[Tensor],
        result: Any = None,
        random: bool,
    ) -> None:
        """Append one operation that has run, or that stands for what would have run."""
        # All inputs count as read, also those that are only written: an order is kept anyhow.
        reads: set[int] = set()

        def as_view(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            view = self._input(value)
            reads.add(view.buffer)
            return view

        viewed_args, viewed_kwargs = map_leaves(as_view, args), map_leaves(as_view, kwargs)
        outputs = tuple(
            self.view(t) if isinstance(t, Tensor) and not self.knows(t) else None
            for t in leaves_of(result)
        )
        writes = {self.view(t).buffer for t in written}
        writes.update(v.buffer for v in outputs if v is not None)
        # An operation that makes and changes nothing, as a question for a shape, is left out.
        if writes:
            entry = TapeEntry(
                function=function,
                args=viewed_args,
                kwargs=viewed_kwargs,
                outputs=outputs,
                reads=frozenset(reads),
                writes=frozenset(writes),
                random=random,
                default_dtype=torch.get_default_dtype(),
            )
            # By place on the tape, for `slice_of`.
            for buffer in writes:
                self._writers.setdefault(buffer, []).append(len(self.entries))
            self.entries.append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, on meta if a meta tensor takes part, and record it."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        # As in `paused`; this mode is off while it handles an operation.
        with torch.DisableTorchFunction():
            for tensor in written:
                self._keep_before_write(tensor)
            leaves = leaves_of((args, kwargs))
            on_meta = any(isinstance(t, Tensor) and t.is_meta for t in leaves)
            result = (
                self._on_meta(func, args, kwargs, written) if on_meta else func(*args, **kwargs)
            )
            # A change of geometry needs no entry: every later use of the tensor tells its view.
            if torch.Tag.inplace_view not in func.tags:
                random = torch.Tag.nondeterministic_seeded in func.tags
                self.record(func, args, kwargs, written=written, result=result, random=random)
        return result

    def _keep_before_write(self, tensor: Tensor) -> None:
        view = self._input(tensor)
        # The constant shares its memory with this tensor, which is about to be overwritten.
        if view.buffer in self._constants and not tensor.is_meta:
            self._constants[view.buffer] = self._constants[view.buffer].clone()

    def _on_meta(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        real = [t for t in written if not t.is_meta]
        # A value that leaves meta: a real tensor would be filled with values that do not exist.
        if real or func is item_operator:
            self._refuse(leaves_of((args, kwargs)), str(func))
        # What an in-place operation returns are the tensors that it wrote: keep their identity.
        returns, only_written = _returned(func)
        if written and only_written and torch.Tag.inplace_view not in func.tags:
            if not returns:
                return None
            return written[0] if returns == 1 else tuple(written)
        to_meta = lambda x: x.to("meta") if isinstance(x, Tensor) else x  # noqa: E731
        try:
            return func(*map_leaves(to_meta, args), **map_leaves(to_meta, kwargs))
        except NotImplementedError:
            self._refuse(leaves_of((args, kwargs)), str(func))
            raise

    def _refuse(self, leaves: Iterable[Any], operation: str) -> None:
        """Raise if values of a parameter are asked for; otherwise let torch say what it has to."""
        metas = [t for t in leaves if isinstance(t, Tensor) and t.is_meta and self.knows(t)]
        for tensor in metas:
            buffers = {self.view(tensor).buffer}
            buffers.update(b for e in self.slice_of(self.view(tensor).buffer) for b in e.reads)
            names = sorted(self.labels[b] for b in buffers if b in self.labels)
            if names:
                raise PlanError(
                    "LP210",
                    f"{operation} needs the values of {', '.join(names)} while the model is "
                    "built, but parameters have no values yet. Compute the result from shapes, "
                    "keep it as a tensor instead of a Python number, or compute it in the first "
                    "step.",
                )

    def slice_of(self, buffer: int) -> list[TapeEntry]:
        """Return the entries that `buffer` depends on, in order."""
        end = len(self.entries)
        found: set[int] = set()
        reach, todo = {buffer: end}, [(buffer, end)]
        while todo:
            needed, before = todo.pop()
            for place in self._writers.get(needed, ()):
                # A writer behind the reader changes the buffer only after it was read.
                if place >= before or place in found:
                    continue
                found.add(place)
                # An earlier reach of the same buffer has taken these writers in already.
                for read in self.entries[place].reads:
                    if reach.get(read, -1) < place:
                        reach[read] = place
                        todo.append((read, place))
        return [self.entries[place] for place in sorted(found)]

    def constant(self, buffer: int) -> Tensor | None:
        """Return the bytes that `buffer` held when the tape met it, None if it saw it made."""
        return self._constants.get(buffer)

    def finish(self) -> None:
        """Forget what no parameter needs, and number the draws that several tensors share."""
        # Backwards over the tape; `sinks` holds, for every buffer, the parameters (or held real
        # tensors) in which its values end up: a draw that ends in several gets its own seed.
        # A real tensor that nobody holds any more is no part of the model.
        gone = {b for b, ref in self._real.items() if ref.expired()}
        held = set(self._real) - gone - set(self.labels)
        sinks: dict[int, set[int]] = {b: {b} for b in self.labels}
        # Parameters, and meta tensors from which they are made.
        wanted = set(range(self._count)) - set(self._real) | set(self.labels)
        leaking: set[int] = set(held)
        kept: list[TapeEntry] = []
        for entry in reversed(self.entries):
            # Backwards: what later entries read is known when an earlier writer is met.
            ends = set().union(*(sinks.setdefault(b, {b}) for b in entry.writes))
            for buffer in entry.reads:
                sinks.setdefault(buffer, set()).update(ends)
            if entry.writes & leaking:
                leaking |= entry.reads
            if entry.writes & wanted:
                wanted |= entry.reads
                kept.append(entry)
        self.entries = kept[::-1]
        self._index()
        draws = [e for e in self.entries if e.random]
        # Seeded by number: each of the parameters sees the same draw.
        shared = [e for e in draws if len(set().union(*(sinks[b] for b in e.writes))) > 1]
        self.shared = {id(e): number for number, e in enumerate(shared)}
        self.leaked = {id(e) for e in draws if e.writes & leaking}
        self._constants = {b: t for b, t in self._constants.items() if b in wanted}
        # Keys of freed storages may be given again.
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}

    def _index(self) -> None:
        self._writers = {}
        for place, entry in enumerate(self.entries):
            for buffer in entry.writes:
                self._writers.setdefault(buffer, []).append(place)
