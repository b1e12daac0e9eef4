"""Copies of samples that are changed so that rules which weighed them alike no longer do."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.batch import batch_entry, BatchDims, take_samples, with_entries
from lightning_par.strategies.step.batch_weights import LossRule

__all__ = ["make_contrast"]


def make_contrast(
    batch: Any, dims: BatchDims, half: int, rules: Sequence[LossRule], labels: Collection[str]
) -> list[tuple[Any, int]]:
    """Return some samples and two parts of them, each with its number of samples.

    The first part has fewer labels and smaller weights than the second, so that rules of the loss
    differ. Empty if no entry of several samples can be changed.

    An entry gets only values that it may hold: the ignored label if it holds one somewhere or is
    in `labels`, else 0; weights become 0, lengths are halved. Each entry keeps another share.

    Args:
        batch: At least one sample, which may be taken several times.
        dims: Which entries have a batch dim.
        half: Number of samples of a part.
        rules: The rules that are to be told apart.
        labels: Entries that are known to be labels.
    """
    assert dims.size is not None
    # A batch of one sample is taken several times over: what is changed makes the copies differ.
    rows = [index % dims.size for index in range(2 * half)]
    taken = take_samples(batch, dims, rows)
    changed: dict[str, Tensor] = {}
    # A label that is ignored tells more than a 0, which may be a label like others.
    for rule in sorted(rules, key=lambda rule: not rule.ignored):
        # Several rules may read one entry: it is changed once, for the likeliest of them.
        if rule.path is None or rule.path in changed:
            continue
        entry = batch_entry(taken, rule.path) if rule.path else taken
        given = batch_entry(batch, rule.path) if rule.path else batch
        value = rule.ignored or 0
        # A class of an ordinary label must not become the ignored one: then the loss would not be
        # that of any batch. It may if the entry holds it already, or if the step was seen to
        # ignore it.
        if not value or rule.path in labels or bool((given == value).any()):
            # Another divisor for each entry, so that rules of two entries do not weigh alike
            # again.
            changed[rule.path] = _weaken(entry, value, half, len(changed) + 2)
    if not changed and dims.size > 1:
        return []
    made = changed[""] if "" in changed else with_entries(taken, changed)
    parts = (range(2 * half), range(half), range(half, 2 * half))
    return [(take_samples(made, dims, list(part)), len(part)) for part in parts]


def _weaken(entry: Tensor, value: int, rows: int, divisor: int) -> Tensor:
    """Return an entry whose first rows keep 1 of `divisor` of what differs from `value`, but two at
    least; one number for each sample is divided instead.
    """
    entry = entry.clone()
    if entry.ndim == 1 and (value or entry.dtype == torch.bool):
        entry[: rows - 1] = value
        return entry
    if entry.ndim == 1:
        weaker = entry[:rows] / divisor
        entry[:rows] = weaker if entry.is_floating_point() else weaker.long().to(entry.dtype)
        return entry
    # Two at least, as a mean over one label may be a special case of the step.
    for row in entry[:rows]:
        places = (row != value).nonzero()
        for place in places[max(2, -(-len(places) // divisor)) :].tolist():
            row[tuple(place)] = value
    return entry
