"""What the user's step returns under a pipeline: that of the micro-batches makes that of the batch.

Numbers are told apart as logged ones are, see `compare_parts`: a count of the samples is the sum of
those of the micro-batches, an accuracy their mean.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_par.strategies.step.batch_weights import BatchWeights, weighted_mean
from lightning_par.strategies.step.step_traces import combine_logs, LogCall

__all__ = [
    "counts_in",
    "merge_results",
    "merge_training",
    "returned_numbers",
    "warn_of_results",
]


def returned_numbers(step: str, result: Any) -> list[LogCall]:
    """Return the numbers that a step returned, but the loss of a training step, as if it logged
    their mean.

    Args:
        step: Its name, which begins that of a number: ``training_step()['count']``.
        result: What it returned.
    """
    if step == "training_step":
        result = _without_loss(result) if isinstance(result, Mapping) else None
    return [
        LogCall(name=name, value=value.detach() if isinstance(value, Tensor) else value, **_LOGGED)
        for name, value in _numbers(result, f"{step}()")
    ]


_LOGGED: Any = {"metric": None, "options": {}}


def _without_loss(result: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in result.items() if key != "loss"}


def _numbers(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _numbers(entry, f"{name}[{key!r}]")
    elif isinstance(value, Tensor):
        # A flag is neither a count nor a mean; parts of a batch agree on it or are listed.
        if value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool:
            yield name, value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def counts_in(result: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the names of the integers other than 0 in what `training_step` returned.

    Args:
        result: That of the batch.
    """
    for call in returned_numbers("training_step", result):
        value = call.value
        is_tensor = isinstance(value, Tensor)
        is_whole = not value.is_floating_point() if is_tensor else isinstance(value, int)
        # An integer 0 is the same as a sum and as a mean.
        if is_whole and (is_tensor or value):  # to ask another device would have to wait for it
            yield call.name


def merge_training(results: Sequence[Mapping[Any, Any]], weights: BatchWeights) -> Any:
    """Merge the dicts that `training_step` returned for every micro-batch, without the loss.

    Args:
        results: In order of the micro-batches.
        weights: Of these; it knows which numbers are sums.
    """
    others = [_without_loss(result) for result in results]
    known = weights.sums | weights.by_samples
    calls = [
        [call for call in returned_numbers("training_step", result) if call.name in known]
        for result in others
    ]
    names = weights.sums, weights.by_samples
    combined = combine_logs(calls, weights.shares, *names, weights.sizes)
    totals = {call.name: call.value for call in combined}
    return merge_results(others, weights.shares, totals, "training_step()")


def warn_of_results(names: Collection[str]) -> None:
    """Say which numbers that a step returned may be others than on one process.

    Args:
        names: Of the numbers.
    """
    if names:
        rank_zero_warn(
            f"each micro-batch and replica has its own value of {', '.join(sorted(names))}. It is "
            "not known whether the value of the whole batch is their mean or their sum. A hook "
            "gets their mean, their common value, or the value of one of them, which may differ "
            "from the value in a run on one process. Log the number with sync_dist=True "
            "(reduce_fx='sum' for a count). Under a pipeline you can also return a tensor with a "
            "dim for the samples, whose parts are concatenated, or use num_microbatches=1."
        )


def merge_results(
    results: Sequence[Any],
    weights: Tensor,
    totals: Mapping[str, Any] | None = None,
    name: str = "",
) -> Any:
    """Merge what a step returned for every micro-batch.

    Mappings and tuples merge entry by entry, tensors with dims and lists are joined along dim 0,
    scalars give their mean, and values that are all equal stay; anything else becomes a list.

    Args:
        results: In order of the micro-batches.
        weights: [m], for the means.
        totals: Name of a number -> that of the batch, where it is known.
        name: Of the results, see `returned_numbers`.
    """
    first = results[0]
    if totals and name in totals:
        total = torch.as_tensor(totals[name])
        if isinstance(first, Tensor):
            return total.to(first.device, first.dtype)
        return type(first)(float(total))
    # The keys of the first: a step returns the same ones for every part of a batch.
    if isinstance(first, Mapping):
        return {
            key: merge_results([r[key] for r in results], weights, totals, f"{name}[{key!r}]")
            for key in first
        }
    if isinstance(first, tuple):
        parts = [
            merge_results(list(part), weights, totals, f"{name}[{index!r}]")
            for index, part in enumerate(zip(*results, strict=True))
        ]
        # A namedtuple takes its fields one by one, a tuple as one iterable.
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Tensor):
        return torch.cat(list(results)) if first.ndim else _mean(results, weights)
    if isinstance(first, float):
        return float(_mean([torch.tensor(r) for r in results], weights))
    # Without a rule for their kind, all values are given rather than one of them.
    return first if all(result == first for result in results) else list(results)


def _mean(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    stacked = torch.stack([v.detach() for v in values])
    # Integers and flags have no weighted mean of their own dtype.
    if not stacked.is_floating_point():
        return stacked.float().mean()
    mean, total = weighted_mean(stacked, weights.to(stacked.device))
    return torch.where(total > 0, mean.to(stacked.dtype), stacked.mean())
