"""Batches: split into micro-batches, entries by path, and the count that the loss averages over.

A batch is any nest of mappings, tuples and lists of tensors and other values. B is the number of
samples.
"""

import copy
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.annotations import Float
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = [
    "batch_entry",
    "batch_size",
    "count_valid",
    "has_entry",
    "map_tensors",
    "sequence_entries",
    "shift_labels",
    "signature",
    "split_batch",
    "tensors_of",
    "to_cpu",
    "with_entries",
]


def map_tensors(batch: Any, function: Any) -> Any:
    """Apply `function` to every tensor; containers keep their type, other values stay.

    Args:
        batch: A mapping that can be changed is copied, so that it keeps what else it holds; any
            other is rebuilt from a dict of its items.
        function: Tensor -> anything.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        # A copy keeps what a mapping holds besides its items, as tokenizers' BatchEncoding does.
        mapped = copy.copy(batch)
        mapped.update({k: map_tensors(v, function) for k, v in batch.items()})
        return mapped
    if isinstance(batch, Mapping):
        return type(batch)({k: map_tensors(v, function) for k, v in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(v, function) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(v, function) for v in batch)
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch in a fixed order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def batch_size(batch: Any) -> int:
    """Return B: the size of dim 0 of the first tensor that has dims.

    Raises:
        ConfigurationError: No tensor has a batch dim.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ConfigurationError(
        "the batch holds no tensor with a batch dim, so it cannot be split into micro-batches or "
        "weighted."
    )


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split a batch along dim 0 into micro-batches of nearly equal size; the first ones are larger.

    Tensors whose dim 0 is not B, and values that are not tensors, go to every micro-batch.

    Args:
        batch: B samples.
        num_microbatches: Number of micro-batches; fewer if B is smaller.
    """
    size = batch_size(batch)
    count = min(num_microbatches, size)
    sizes = [size // count + (i < size % count) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]

    def rows(tensor: Tensor, start: int, length: int) -> Tensor:
        has_batch_dim = tensor.ndim > 0 and tensor.shape[0] == size
        return tensor.narrow(0, start, length) if has_batch_dim else tensor

    return [
        map_tensors(batch, lambda t, s=start, n=length: rows(t, s, n))
        for start, length in zip(starts, sizes, strict=True)
    ]


def batch_entry(batch: Any, path: str) -> Any:
    """Return an entry of a batch by its path, such as ``"labels"``, ``"1"`` or ``"text.labels"``.

    Raises:
        PlanError: There is no such entry.
    """
    value, passed = batch, list[str]()
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list | tuple) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            where = repr(".".join(passed)) if passed else "the batch"
            has = f"is a {type(value).__name__}"
            if isinstance(value, Mapping):
                has = f"has {sorted(map(str, value))}"
            elif isinstance(value, list | tuple):
                has = f"has {len(value)} entries ({type(value).__name__})"
            raise PlanError(f"the plan names the batch entry {path!r}, but {where} {has}.")
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
    try:
        return batch_entry(batch, path) is not None
    except PlanError:
        return False


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
    if isinstance(batch, Mapping):
        inner = _with_entry(batch[step], rest, value)
        if isinstance(batch, MutableMapping):
            changed = copy.copy(batch)
            changed[step] = inner
            return changed
        return type(batch)({**batch, step: inner})  # type: ignore[call-arg]
    items = [_with_entry(v, rest, value) if i == int(step) else v for i, v in enumerate(batch)]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def count_valid(batch: Any, layout: BatchLayout) -> Float[Tensor, ""]:
    """Return how many entries the loss of `batch` averages over, as a float64 scalar on the batch's
    device.

    Args:
        batch: A batch or a micro-batch.
        layout: With `labels`: the labels that are not `ignore_index`, after `label_shift`. Without:
            B samples.
    """
    if layout.labels is None:
        size = batch_size(batch)
        device = next(tensors_of(batch)).device
        return torch.tensor(float(size), dtype=torch.float64, device=device)
    is_shifted = layout.shifted is not None and has_entry(batch, layout.shifted)
    labels = batch_entry(batch, layout.shifted or "" if is_shifted else layout.labels)
    if layout.label_shift and not is_shifted:
        dim = layout.sequence_dims.get(layout.labels, 1)
        labels = labels.narrow(dim, layout.label_shift, labels.shape[dim] - layout.label_shift)
    count: Tensor = (labels != layout.ignore_index).sum(dtype=torch.float64)
    return count


def signature(batch: Any, *extra: Hashable) -> Hashable:
    """Return the shapes and dtypes of a batch, and `extra`, as a key that ranks agree on."""
    return (tuple((tuple(t.shape), t.dtype) for t in tensors_of(batch)), *extra)


def to_cpu(tree: Any) -> Any:
    """Return the nest with every tensor detached and on the CPU."""
    return map_tensors(tree, lambda t: t.detach().cpu())
