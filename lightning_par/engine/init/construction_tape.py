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

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.errors import PlanError
from lightning_par.upstream.dispatch import item_operator, operator_schema, TorchDispatchMode
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import tree_leaves, tree_map
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


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for place, argument in enumerate(operator_schema(func).arguments):
        # Of the operator's schema: `a!` marks what is written in place.
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


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

    def paused(self) -> AbstractContextManager[None]:
        """Run operations without recording them."""
        return replaced(self, "_paused", True)

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether the tape has met the storage of `tensor`."""
        return storage_key(tensor.untyped_storage()) in self._storages

    def view(self, tensor: Tensor) -> TensorView:
        """Return how the tape refers to `tensor`, a new buffer if it has not met its storage."""
        storage = tensor.untyped_storage()
        # A storage is a buffer, whatever views of it come.
        if storage_key(storage) not in self._storages:
            self._name(storage, self._count)
            if not tensor.is_meta:
                self._real[self._count] = self._storages[storage_key(storage)][0]
            self._count += 1
        return TensorView(
            buffer=self._storages[storage_key(storage)][1],
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
        )

    def _name(self, storage: torch.UntypedStorage, buffer: int) -> None:
        # Weakly: a key may be given to another storage once this one is freed.
        self._storages[storage_key(storage)] = (StorageWeakRef(storage), buffer)

    def adopt(self, tensor: Tensor, label: str) -> Tensor:
        """Return a meta tensor that stands for `tensor`: one history from now on.

        Args:
            tensor: A parameter about to be registered; real or meta.
            label: How messages name it.
        """
        view = self._input(tensor)
        self.labels.setdefault(view.buffer, label)
        if tensor.is_meta:
            return tensor
        # The base has as many bytes as the real storage, so that views keep their geometry.
        with self.paused(), torch.no_grad():
            entries = tensor.untyped_storage().nbytes() // tensor.element_size()
            base = torch.empty(entries, dtype=tensor.dtype, device="meta")
            self._name(base.untyped_storage(), view.buffer)
            return base.as_strided(view.size, view.stride, view.offset)

    def _input(self, tensor: Tensor) -> TensorView:
        """Like `view`; the present values of a real tensor that the tape has not met are kept."""
        met = self.knows(tensor)
        view = self.view(tensor)
        if not met and not tensor.is_meta:
            with self.paused():
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
        as_view = lambda x: self._input(x) if isinstance(x, Tensor) else x  # noqa: E731
        viewed_args, viewed_kwargs = tree_map(as_view, args), tree_map(as_view, kwargs)
        inputs = [x for x in tree_leaves((viewed_args, viewed_kwargs)) if isinstance(x, TensorView)]
        # All inputs count as read, also those that are only written: an order is kept anyhow.
        reads = frozenset(v.buffer for v in inputs)
        outputs = tuple(
            self.view(t) if isinstance(t, Tensor) and not self.knows(t) else None
            for t in tree_leaves(result)
        )
        writes = frozenset(self.view(t).buffer for t in written)
        writes |= {v.buffer for v in outputs if v is not None}
        # An operation that makes and changes nothing, as a question for a shape, is left out.
        if writes:
            entry = TapeEntry(
                function=function,
                args=viewed_args,
                kwargs=viewed_kwargs,
                outputs=outputs,
                reads=reads,
                writes=writes,
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
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = _written(func, args, kwargs)
        with self.paused():
            for tensor in written:
                self._keep_before_write(tensor)
            on_meta = any(t.is_meta for t in tensors)
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
            self._refuse(tree_leaves((args, kwargs)), str(func))
        returns = operator_schema(func).returns
        # What an in-place operation returns are the tensors that it wrote: keep their identity.
        aliases = all(r.alias_info is not None and r.alias_info.is_write for r in returns)
        if written and aliases and torch.Tag.inplace_view not in func.tags:
            if not returns:
                return None
            return written[0] if len(returns) == 1 else tuple(written)
        to_meta = lambda x: x.to("meta") if isinstance(x, Tensor) else x  # noqa: E731
        try:
            return func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except NotImplementedError:
            self._refuse(tree_leaves((args, kwargs)), str(func))
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
