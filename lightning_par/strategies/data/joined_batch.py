"""The global batch: those of the replicas, joined.

Replicas take samples in turns, as a distributed sampler deals them out, so the first samples of all
replicas come first: a step that draws a number for every sample draws them in this order.
"""

import copy
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.tensor_tree import map_tensors, rebuild, tensors_of
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = ["CannotJoinError", "cut_replica", "join_batches", "samples_of"]


class CannotJoinError(Exception):
    """The batches of the replicas have no common shape; the text says why."""


def join_batches(parts: Sequence[Any], layout: BatchLayout | None = None) -> Any:
    """Return one batch of the samples of all replicas.

    Tensors with a batch dim, and lists of as many items, are joined; anything else is taken once,
    if all replicas have the same.

    Args:
        parts: One batch of every replica.
        layout: Pad tensors of unequal shapes at the end: labels, and what holds its
            `ignore_index`, with that, anything else with 0. None: unequal shapes are an error.

    Raises:
        CannotJoinError: The batches cannot be joined.
    """
    if len(parts) == 1:
        return parts[0]
    sizes = [samples_of(part) for part in parts]
    return _join(list(parts), sizes, "", layout)


def samples_of(batch: Any) -> int:
    """Return the size that most tensors have in dim 0; without tensors, the length of a list."""
    # Most: masks of attention or tables may have other first dims.
    sizes = Counter(t.shape[0] for t in tensors_of(batch) if t.ndim)
    if sizes:
        return sizes.most_common(1)[0][0]
    return len(batch) if isinstance(batch, list | tuple) else -1


def cut_replica(batch: Any, sizes: Sequence[int], replica: int) -> Any:
    """Return the samples of one replica in a joined batch.

    Args:
        batch: From `join_batches`.
        sizes: Number of samples of every replica.
        replica: Number of the replica.
    """
    first = sum(sizes[:replica])
    order = _turns(sizes)
    # Inverse of `_turns`: places of this replica's samples in the joined batch.
    rows = [at for at, number in enumerate(order) if first <= number < first + sizes[replica]]

    def cut(tensor: Tensor) -> Tensor:
        has_batch_dim = tensor.ndim > 0 and tensor.shape[0] == len(order)
        return tensor[rows] if has_batch_dim else tensor

    return map_tensors(batch, cut)


def _turns(sizes: Sequence[int]) -> list[int]:
    """Return the order of samples, numbered replica by replica, in a joined batch."""
    starts = [sum(sizes[:replica]) for replica in range(len(sizes))]
    return [
        start + turn
        for turn in range(max(sizes))
        for start, size in zip(starts, sizes, strict=True)
        if turn < size
    ]


def _join(values: list[Any], sizes: Sequence[int], path: str, layout: Any) -> Any:  # house: by kind
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise CannotJoinError(f"{_named(path)} has different types on the replicas")

    def inner(key: Any, items: list[Any]) -> Any:
        return _join(items, sizes, f"{path}.{key}".lstrip("."), layout)

    if isinstance(first, Tensor):
        return _join_tensors(values, sizes, path, layout)
    if isinstance(first, Mapping):
        if any(set(value) != set(first) for value in values):
            raise CannotJoinError(f"{_named(path)} has different keys on the replicas")
        joined = {key: inner(key, [value[key] for value in values]) for key in first}
        # A copy keeps what a class of the user's holds besides its entries.
        if isinstance(first, MutableMapping):
            made = copy.copy(first)
            made.update(joined)
            return made
        return type(first)(joined)  # type: ignore[call-arg]
    # E.g. texts or names, one for each sample.
    if isinstance(first, list) and _is_list_of_samples(values, sizes):
        items = [item for value in values for item in value]
        return [items[number] for number in _turns(sizes)]
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            raise CannotJoinError(f"{_named(path)} has different lengths on the replicas")
        items = [inner(i, list(items)) for i, items in enumerate(zip(*values, strict=True))]
        return rebuild(first, [*enumerate(items)])
    if hasattr(first, "__dict__") and type(first).__module__ != "builtins":
        made = copy.copy(first)
        for key in vars(first):
            # Past a frozen dataclass's own.
            object.__setattr__(made, key, inner(key, [vars(value)[key] for value in values]))
        return made
    if not all(bool(value == first) for value in values):
        raise CannotJoinError(f"{_named(path)} has different values on the replicas")
    return first


def _named(path: str) -> str:
    return f"the entry {path!r}" if path else "the batch"


def _is_list_of_samples(values: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether a list has one item for every sample, rather than one for every entry."""
    if any(len(value) != size for value, size in zip(values, sizes, strict=True)):
        return False
    # A list of tensors with a batch dim each is a batch with entries.
    tensors = [(v, size) for value, size in zip(values, sizes, strict=True) for v in value]
    return not all(isinstance(t, Tensor) and t.ndim and t.shape[0] == s for t, s in tensors)


def _join_tensors(values: list[Tensor], sizes: Sequence[int], path: str, layout: Any) -> Tensor:
    first = values[0]
    if first.ndim == 0 or any(
        v.ndim != first.ndim or v.shape[0] != size for v, size in zip(values, sizes, strict=True)
    ):
        if all(v.shape == first.shape and torch.equal(v, first) for v in values):
            return first
        raise CannotJoinError(f"{_named(path)} has no batch dim and differs between the replicas")
    if any(v.shape[1:] != first.shape[1:] for v in values):
        if layout is None:
            raise CannotJoinError(f"{_named(path)} has different shapes on the replicas")
        # Replicas pad their own batches to the longest of their own samples.
        longest = [max(v.shape[d] for v in values) for d in range(1, first.ndim)]
        is_label = path in (layout.labels, layout.shifted) or any(
            not v.is_floating_point() and bool((v == layout.ignore_index).any()) for v in values
        )
        values = [_padded(v, longest, layout.ignore_index if is_label else 0) for v in values]
    return torch.cat(values)[_turns(sizes)]


def _padded(value: Tensor, sizes: Sequence[int], filling: int) -> Tensor:
    room = value.new_full((value.shape[0], *sizes), filling)
    room[tuple(slice(size) for size in value.shape)] = value
    return room
