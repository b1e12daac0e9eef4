"""Putting the results of micro-batches together to what one step would have returned."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["merge_results"]


def merge_results(results: Sequence[Any], weights: Tensor) -> Any:
    """Merge what a step returned for every micro-batch.

    Mappings and tuples merge entry by entry, tensors with dims and lists are joined along dim 0,
    scalars give their mean, and values that are all equal stay; anything else becomes a list.

    Args:
        results: In order of the micro-batches.
        weights: [m], for the means.
    """
    first = results[0]
    if isinstance(first, Mapping):
        return {key: merge_results([r[key] for r in results], weights) for key in first}
    if isinstance(first, tuple):
        parts = [merge_results(list(p), weights) for p in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Tensor):
        return torch.cat(list(results)) if first.ndim else _mean(results, weights)
    if isinstance(first, float):
        return float(_mean([torch.tensor(r) for r in results], weights))
    return first if all(result == first for result in results) else list(results)


def _mean(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    stacked = torch.stack([v.detach() for v in values])
    used = weights.to(stacked.device)
    if not stacked.is_floating_point() or not bool(used.any()):
        return stacked.float().mean()
    kept = torch.where(used > 0, stacked, 0)
    return ((kept * used).sum() / used.sum()).to(stacked.dtype)
