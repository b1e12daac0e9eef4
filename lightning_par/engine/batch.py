"""Batches: their entries by path, their batch dim, micro-batches, and counts of labels.

A batch is any nest of mappings, tuples, lists and objects (dataclasses, and others) of tensors,
arrays and other values. B is the number of samples.

Length: what tells the batch dims, and what cuts along them, follow the same nests.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.engine.tensor_tree import children, rebuild, tensors_of
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = [
    "BatchDims",
    "BatchDimsFinder",
    "batch_entry",
    "batch_size",
    "count_valid",
    "cut_batch",
    "find_batch_dims",
    "has_entry",
    "sequence_entries",
    "shift_labels",
    "signature",
    "split_batch",
    "split_rows",
    "take_samples",
    "tokens_of",
    "with_entries",
]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


@dataclass(frozen=True, kw_only=True)
class BatchDims:
    """Which entries of a batch have a batch dim.

    Attributes:
        size: B; None if there is no entry with a batch dim.
        dims: Entry -> its batch dim; of a list of one value per sample it is 0.
        others: Entries with a dim 0 of another size, which nobody declared.
        unsure: Why `size` may be wrong: what could be B as well; empty if it is known.
    """

    size: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    unsure: str = ""


def find_batch_dims(
    batch: Any, layout: BatchLayout, sizes: Collection[int] = (), known: Collection[str] = ()
) -> BatchDims:
    """Tell which entries of a batch have a batch dim, and how large it is.

    B is what declared entries have (labels, sequences, `batch_dims`); else what `known` ones have;
    else a size of the data loader that some entry has; else what all tensors have in dim 0.

    Args:
        batch: Any nest.
        layout: What is declared.
        sizes: Batch sizes of the data loaders, if they are known.
        known: Entries that had a batch dim in an earlier batch.

    Raises:
        PlanError: Declared entries have different numbers of samples.
    """
    extents = dict(_extents(batch, "", layout))
    tensors = {path: size for path, (size, is_list) in extents.items() if not is_list}
    declared = _declared(batch, layout)
    if len(set(declared.values())) > 1:
        raise PlanError(
            "LP301",
            f"entries of BatchLayout have different numbers of samples: {declared}. If a batch "
            "dim is not dim 0, declare it in batch_dims=. Name entries without a batch dim in "
            "whole=.",
        )
    seen = {extents[path][0] for path in known if path in extents}
    given = {*sizes} & {size for size, _ in extents.values()}
    found = {*tensors.values()} or {size for size, _ in extents.values()}
    unsure = ""
    for choice in (set(declared.values()), seen, given, found):
        if len(choice) == 1:
            size = next(iter(choice))
            break
    else:
        if not found:
            return BatchDims()
        size, unsure = next(iter(tensors.values())), _describe(tensors)
    if not declared and not seen and sizes and not given and size > max(sizes):
        unsure = f"{_describe(extents, pairs=True)}, but the loader gives {max(sizes)} samples"
    dims = dict(_cuts(batch, "", layout, size, {p.rpartition(".")[0] for p in known if p}))
    others = tuple(p for p, n in tensors.items() if n != size and p not in dims)
    below = tuple(f"{path}." for path in dims)
    others = tuple(p for p in others if not p.startswith(below))
    return BatchDims(size=size, dims=dims, others=others, unsure=unsure)


class BatchDimsFinder:
    """Tells which entries of a batch have a batch dim.

    Args:
        layout: What is declared.
        microbatches: Into how many a batch is cut.
        replicas: Among how many a batch is divided.
    """

    def __init__(self, layout: BatchLayout, microbatches: int, replicas: int) -> None:
        kinds = [f"{microbatches} micro-batches"] * (microbatches > 1)
        kinds += [f"{replicas} replicas"] * (replicas > 1)
        self._layout, self._divided = layout, " and ".join(kinds)
        self._sizes: set[int] = set()
        self._known: set[str] = set()
        self.given: int | None = None  # samples that the sampler gave the batch, if it is known
        self.is_whole = False  # whether the batch is not cut, nor weighed against others

    def add_loader(self, dataloader: object) -> None:
        """Take note of the batch size of a data loader, if it tells one."""
        if not isinstance(dataloader, DataLoader):
            return
        size = dataloader.batch_size
        if size is None:
            size = getattr(dataloader.batch_sampler, "batch_size", None)
        if isinstance(size, int):
            self._sizes.add(size)

    def find(self, batch: Any, *, must_know: bool) -> BatchDims:
        """Return which entries of a batch have a batch dim.

        Args:
            batch: That of this replica.
            must_know: Whether to refuse a batch whose size is not known for sure.

        Raises:
            PlanError: See `must_know`; or declared entries have unequal numbers of samples.
        """
        if self.is_whole:
            entries = _extents(batch, "", self._layout)
            return BatchDims(size=next((n for _, (n, is_list) in entries if not is_list), None))
        own = {self.given} if self.given else self._sizes
        dims = find_batch_dims(batch, self._layout, own, self._known)
        if not dims.unsure:
            self._known.update(dims.dims)
        elif must_know:
            raise PlanError(
                "LP301",
                f"a batch cannot be divided over {self._divided}, since the sizes of its entries "
                f"do not show which of them have a batch dim: {dims.unsure}. Declare entries with "
                "a batch dim in ParallelPlan(batch=BatchLayout(batch_dims={entry: dim})), or "
                "entries without a batch dim in BatchLayout(whole=(entry, ...)). If a batch cannot "
                "be cut, use num_microbatches=1 instead. If replicas get unequal numbers of "
                "samples in a step, declare loss_weight='samples' for a loss that is a mean, or "
                "loss_weight='sum' for a sum.",
            )
        return dims


def _describe(extents: Mapping[str, Any], *, pairs: bool = False) -> str:
    named = [f"{p or 'the batch'!r} has {n[0] if pairs else n}" for p, n in extents.items()]
    return ", ".join(named[:8])


def _extents(node: Any, path: str, layout: BatchLayout) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield path, size of dim 0 (of the declared batch dim) and whether it is a list's length."""
    if path in layout.whole:
        return
    if isinstance(node, Tensor | np.ndarray):
        dim = layout.batch_dims.get(path, 0)
        if node.ndim > dim:
            yield path, (node.shape[dim], False)
        return
    if _is_plain_list(node) and len({type(value) for value in node} - {type(None)}) == 1:
        yield path, (len(node), True)
    for key, value in children(node) or ():
        yield from _extents(value, _join(path, key), layout)


def _is_plain_list(node: Any) -> bool:
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def _declared(batch: Any, layout: BatchLayout) -> dict[str, int]:
    """Return the sizes of the batch dims of declared entries that the batch has."""
    named = {path: 0 for path, dim in layout.sequence_dims.items() if dim != 0}
    for path in (layout.labels, layout.shifted):
        if path is not None and layout.sequence_dims.get(path) != 0:
            named[path] = 0
    found = {}
    for path, dim in {**named, **layout.batch_dims}.items():
        if path in layout.whole or not has_entry(batch, path):
            continue
        entry = batch_entry(batch, path)
        if isinstance(entry, Tensor | np.ndarray) and entry.ndim > dim:
            found[path] = int(entry.shape[dim])
        elif _is_plain_list(entry):
            found[path] = len(entry)
    return found


def _cuts(
    node: Any, path: str, layout: BatchLayout, size: int, holders: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield the entries that hold `size` samples, and their batch dims; `holders` hold entries."""
    if path in layout.whole:
        return
    if path in layout.batch_dims:
        yield path, layout.batch_dims[path]
    elif isinstance(node, Tensor | np.ndarray):
        if node.ndim and node.shape[0] == size:
            yield path, 0
    # What held entries of samples before is no list of samples now, if it has as many by chance.
    elif (
        _is_plain_list(node)
        and path not in holders
        and _lists_samples(node, size, is_batch=not path)
    ):
        yield path, 0
    else:
        for key, value in children(node) or ():
            yield from _cuts(value, _join(path, key), layout, size, holders)


def _lists_samples(node: Any, size: int, *, is_batch: bool) -> bool:
    """Tell a list of one value per sample from one of entries that have a batch dim each."""
    if len(node) != size:
        return False
    held = [_holds(value, size) for value in node]
    if is_batch and all(_is_plain_list(value) and len(value) == size for value in node):
        # Entries of one kind each, of which two differ, as images and labels: no samples.
        kinds = [{_kind(value) for value in entry} for entry in node]
        if all(len(kind) == 1 for kind in kinds) and any(kind != kinds[0] for kind in kinds):
            return False
    if is_batch or not any(held):
        return not any(held)
    alike = len({type(value) for value in node}) == 1
    # One mapping for each sample is likelier than as many mappings of batches as there are samples.
    return alike and not (all(held) and isinstance(node[0], Tensor | np.ndarray))


def _kind(value: Any) -> Hashable:
    return (type(value), *((value.dtype, value.ndim) if isinstance(value, Tensor) else ()))


def _holds(node: Any, size: int) -> bool:
    if isinstance(node, Tensor | np.ndarray):
        return bool(node.ndim) and node.shape[0] == size
    return any(_holds(value, size) for _, value in children(node) or ())


def batch_size(batch: Any) -> int:
    """Return B, as `find_batch_dims` tells it without a declaration.

    Raises:
        ConfigurationError: Nothing has a batch dim.
    """
    size = find_batch_dims(batch, BatchLayout()).size
    if size is None:
        raise ConfigurationError(
            "LP301",
            "this batch has no tensor with a batch dim, so its number of samples is not "
            "known. Add a tensor with one entry for each sample to the batch in the collate_fn.",
        )
    return size


def split_rows(size: int, count: int) -> list[tuple[int, int]]:
    """Return first sample and number of samples of every micro-batch; the first ones are larger.

    Args:
        size: B.
        count: Number of micro-batches; fewer if B is smaller.
    """
    count = max(1, min(count, size))
    sizes = [size // count + (i < size % count) for i in range(count)]
    return [(sum(sizes[:i]), sizes[i]) for i in range(count)]


def cut_batch(batch: Any, dims: BatchDims, start: int, length: int) -> Any:
    """Return the samples ``start .. start + length`` of a batch; tensors share its memory.

    What has no batch dim is the same in every part.
    """

    def cut(node: Any, dim: int) -> Any:
        if isinstance(node, Tensor):
            if node.layout is not torch.strided:  # which has no views
                return node.narrow_copy(dim, start, length)
            part = node.narrow(dim, start, length)
            return part if part.requires_grad else part.data  # which counts its own changes
        if isinstance(node, np.ndarray):
            return node.take(range(start, start + length), dim)
        return node[start : start + length]

    return _map_cut(batch, "", dims.dims, cut)


def take_samples(batch: Any, dims: BatchDims, rows: Sequence[int]) -> Any:
    """Return a copy of the samples of a batch that have the numbers `rows`."""

    def take(node: Any, dim: int) -> Any:
        if isinstance(node, Tensor):
            return node.index_select(dim, torch.tensor(rows, device=node.device))
        if isinstance(node, np.ndarray):
            return node.take(rows, dim)
        return type(node)(node[row] for row in rows)

    return _map_cut(batch, "", dims.dims, take)


def _map_cut(
    node: Any, path: str, dims: Mapping[str, int], function: Callable[[Any, int], Any]
) -> Any:
    if path in dims:
        return function(node, dims[path])
    held = children(node)
    if held is None:
        return node
    return rebuild(node, [(k, _map_cut(v, _join(path, k), dims, function)) for k, v in held])


def split_batch(batch: Any, num_microbatches: int, dims: BatchDims | None = None) -> list[Any]:
    """Split a batch into micro-batches of nearly equal size; the first ones are larger.

    Args:
        batch: B samples.
        num_microbatches: Number of micro-batches; fewer if B is smaller, and one if nothing has a
            batch dim.
        dims: Which entries have a batch dim; None: what `find_batch_dims` tells.
    """
    dims = dims or find_batch_dims(batch, BatchLayout())
    if dims.size is None:
        return [batch]
    return [cut_batch(batch, dims, *rows) for rows in split_rows(dims.size, num_microbatches)]


def _named(node: Any, held: list[tuple[Any, Any]] | None) -> dict[str, tuple[Any, Any]]:
    """Return a container's pairs by what a path may call them: key, attribute, or place."""
    pairs = held or []
    named = {} if isinstance(node, Mapping) else {str(i): pair for i, pair in enumerate(pairs)}
    fields_of_tuple = zip(getattr(node, "_fields", ()), pairs, strict=False)
    return {**named, **dict(fields_of_tuple), **{str(pair[0]): pair for pair in pairs}}


def batch_entry(batch: Any, path: str) -> Any:
    """Return an entry of a batch by its path, such as ``"labels"``, ``"1"`` or ``"text.labels"``;
    an empty path means the batch itself.

    Raises:
        PlanError: There is no such entry.
    """
    value, passed = batch, list[str]()
    for step in path.split(".") if path else ():
        held = children(value)
        found = {name: entry for name, (_, entry) in _named(value, held).items()}
        if step not in found:
            where = repr(".".join(passed)) if passed else "the batch"
            kind = type(value).__name__
            has = f"is a {kind}"
            if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                has = f"has {len(value)} entries ({kind}), called '0', '1' and so on"
            elif held is not None:
                has = f"has {sorted(str(key) for key, _ in held)}"
            raise PlanError(
                "LP302",
                f"the plan names the batch entry {path!r}, but {where} {has}. Correct the name in "
                "BatchLayout.",
            )
        value = found[step]
        passed.append(step)
    return value


def sequence_entries(batch: Any, layout: BatchLayout) -> dict[str, int]:
    """Return the entries of `layout.sequence_dims`, without optional ones that the batch lacks.

    Args:
        batch: A batch or a micro-batch.
        layout: The plan's description of batches.
    """
    return {
        path: dim
        for path, dim in layout.sequence_dims.items()
        if path not in layout.optional or has_entry(batch, path)
    }


def has_entry(batch: Any, path: str) -> bool:
    """Return whether a batch has an entry that is not None.

    Args:
        batch: A batch or a micro-batch.
        path: As in `batch_entry`.
    """
    value = batch
    for step in path.split(".") if path else ():
        _, value = _named(value, children(value)).get(step, (None, None))
    return value is not None


def tokens_of(path: str, entry: Any, dim: int) -> int:
    """Return T of an entry of the batch.

    Args:
        path: Where the entry is, for the message.
        entry: What is there.
        dim: Its sequence dim.

    Raises:
        PlanError: The entry has no such dim.
    """
    shape = tuple(getattr(entry, "shape", ()))
    if not -len(shape) <= dim < len(shape):
        found, cure = (
            f"its shape is {shape}",
            "Correct this dim in BatchLayout(sequence_dims=...), or remove the entry from "
            "sequence_dims if it has no sequence dim.",
        )
        if entry is None:
            found = "this entry is None"
            cure = "Give every batch this entry, or name it in BatchLayout(optional=...), too."
        raise PlanError(
            "LP302",
            f"the plan says that dim {dim} of the batch entry {path!r} is its sequence dim, but "
            f"{found}. {cure}",
        )
    return int(shape[dim])


def shift_labels(batch: Any, layout: BatchLayout) -> Any:
    """Return a batch whose labels are shifted to the tokens that have to predict them.

    Args:
        batch: A mapping.
        layout: With `labels`, `shifted` and a `label_shift`.

    Returns:
        The same entries; those of `labels` and `shifted` are the labels, moved `label_shift` tokens
        towards the start, and `ignore_index` at the end.
    """
    assert layout.labels is not None
    assert layout.shifted is not None
    labels: Tensor = batch_entry(batch, layout.labels)
    dim, size = layout.sequence_dims[layout.labels], layout.label_shift
    if has_entry(batch, layout.shifted):
        moved = batch_entry(batch, layout.shifted)
    else:
        rest = labels.narrow(dim, size, labels.shape[dim] - size)
        end = torch.full_like(labels.narrow(dim, 0, size), layout.ignore_index)
        moved = torch.cat([rest, end], dim)
    changed = copy.copy(batch)
    changed[layout.labels] = changed[layout.shifted] = moved
    return changed


def with_entries(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a batch with other values in some entries; containers keep their type.

    Args:
        batch: Has all of these entries.
        values: Path as in `batch_entry` -> new value.
    """
    for path, value in values.items():
        batch = _with_entry(batch, path.split("."), value)
    return batch


def _with_entry(batch: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    held = children(batch) or []
    key, _ = _named(batch, held)[step]
    return rebuild(batch, [(k, _with_entry(v, rest, value) if k == key else v) for k, v in held])


def count_valid(batch: Any, layout: BatchLayout) -> Tensor:
    """Return how many entries the loss of `batch` averages over, as a float64 scalar on the batch's
    device.

    Args:
        batch: A batch or a micro-batch.
        layout: With `labels`: the labels that are not `ignore_index`, after `label_shift`. Without:
            B samples.
    """
    if layout.labels is None:
        tensor = next(tensors_of(batch), None)
        device = None if tensor is None else tensor.device
        size = find_batch_dims(batch, layout).size or 1
        return torch.tensor(float(size), dtype=torch.float64, device=device)
    is_shifted = layout.shifted is not None and has_entry(batch, layout.shifted)
    path = layout.shifted or "" if is_shifted else layout.labels
    labels = batch_entry(batch, path)
    if labels is None:
        raise PlanError(
            "LP302",
            f"the batch has no entry {path!r}, which BatchLayout declares as the labels. Add this "
            "entry to every batch. If some batches have no labels, declare none, as in "
            "ParallelPlan(batch=BatchLayout()).",
        )
    if layout.label_shift and not is_shifted:
        dim = layout.sequence_dims.get(layout.labels, 1)
        labels = labels.narrow(dim, layout.label_shift, labels.shape[dim] - layout.label_shift)
    count: Tensor = (labels != layout.ignore_index).sum(dtype=torch.float64)
    return count


def signature(batch: Any, *extra: Hashable) -> Hashable:
    """Return shapes, dtypes and texts of a batch, and `extra`, as a key that ranks agree on.

    Texts are in it, since a step that tokenizes them makes tensors of their lengths.
    """
    return (tuple(_marks(batch)), *extra)


def _marks(node: Any) -> Iterator[Hashable]:
    if isinstance(node, Tensor):
        yield tuple(node.shape), node.dtype
    elif isinstance(node, np.ndarray):
        yield tuple(node.shape), str(node.dtype)
    elif isinstance(node, str | bytes):
        yield node
    else:
        for _, value in children(node) or ():
            yield from _marks(value)
