"""Which rule makes the loss of a batch of the losses of its parts, where a run has to find it.

Note [Finding the rule]: the loss of a few samples is compared with the losses of two parts of them.
Of the rules that a loss usually follows (mean over samples, sum, mean over the labels that count,
mean weighted by an entry) it shows which one it follows. Two rules that weigh all samples alike so
far are told apart in the first batch for which they differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.batch import batch_entry, BatchDims
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.step.batch_weights import (
    count_entries,
    declared_rule,
    entries_unlike,
    LossRule,
    MEAN_OVER_SAMPLES,
    sum_of_class_weights,
    sum_of_entry,
    SUM_OVER_SAMPLES,
)
from lightning_par.strategies.step.step_traces import LogCall

__all__ = ["Seen", "candidate_rules", "choose_rule", "rule_error"]

_MARK = -100
"""The label that PyTorch's losses ignore by default; it has no other use."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What running the step on some batches gave.

    Attributes:
        losses: Its losses, for each batch one of every backward.
        logs: The calls that logged numbers, for each batch.
        metrics: FQN -> value of the torchmetrics that it updates, for the first batch, and for the
            others together.
        leaves: Names of attributes of the LightningModule that it changes.
    """

    losses: list[tuple[float, ...]]
    logs: list[list[LogCall]]
    metrics: tuple[dict[str, Any], dict[str, Any]]
    leaves: tuple[str, ...] = ()


def _has_equal_rows(path: str, batch: Any) -> bool:
    entry: Tensor = batch_entry(batch, path)
    rows = entry.flatten(1).sum(1) if entry.ndim > 1 else entry
    return bool((rows == rows[:1]).all())


def candidate_rules(
    batch: Any, layout: BatchLayout, dims: BatchDims, module: nn.Module
) -> list[LossRule]:
    """Return the rules that a loss may follow, the likely ones first.

    They follow from the structure of the batch alone, so that every replica has the same.

    Args:
        batch: Its entries may hold labels, masks and weights.
        layout: What is declared.
        dims: Which entries have a batch dim.
        module: Its criterions may have class weights, or labels that they ignore.
    """
    # Samples before counts that agree with them: replicas may pad to other lengths.
    rules = [declared_rule(layout), MEAN_OVER_SAMPLES]
    integers: list[tuple[str, int]] = []
    numbers: list[tuple[str, int]] = []
    for path, dim in dims.dims.items():
        entry = batch_entry(batch, path) if path else batch
        if not isinstance(entry, Tensor) or dim != 0:
            continue
        is_index = not (
            entry.is_floating_point() or entry.is_complex() or entry.dtype == torch.bool
        )
        (integers if is_index else numbers).append((path, entry.ndim))
    criterions = [m for m in module.modules() if isinstance(m, nn.CrossEntropyLoss | nn.NLLLoss)]
    values = [getattr(criterion, "ignore_index", None) for criterion in criterions]
    ignored = {value for value in values if isinstance(value, int)}
    for value in dict.fromkeys([_MARK, *sorted(ignored - {_MARK}), 0]):
        rules += [
            LossRule(
                name=f"the mean over {path or 'the batch'!r} != {value}" + " (shifted)" * shift,
                weigh=partial(count_entries, path, value, shift),
                declare=f"labels={path!r}, ignore_index={value}" + ", label_shift=1" * shift,
                is_uniform=partial(_counts_all, path, value, shift),
                is_likely=value == _MARK and not shift,
            )
            for path, ndim in integers
            for shift in range(2 if ndim > 1 else 1)
        ]
    rules += list(_summed(numbers))
    classes = dict(_class_weights(batch, dims, criterions))
    rules += [
        LossRule(
            name=f"the mean weighted by the class weights {name} of {path!r}",
            weigh=partial(sum_of_class_weights, path, weight),
            declare="loss_weight=... (a function of the batch)",
        )
        for path, _ in integers
        for name, weight in classes.items()
    ]
    return list({rule.name: rule for rule in [*rules, SUM_OVER_SAMPLES]}.values())


def _summed(entries: Sequence[tuple[str, int]]) -> Iterator[LossRule]:
    for path, ndim in entries:
        if path and ndim <= 2:
            yield LossRule(
                name=f"the mean weighted by {path!r}",
                weigh=partial(sum_of_entry, path),
                declare=f"loss_weight={path!r}",
                is_uniform=partial(_has_equal_rows, path),
            )


def _class_weights(
    batch: Any, dims: BatchDims, criterions: Sequence[nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    for path in dims.others:
        entry = batch_entry(batch, path)
        if isinstance(entry, Tensor) and entry.is_floating_point() and entry.ndim == 1:
            yield repr(path), entry
    for index, criterion in enumerate(criterions):
        weight = getattr(criterion, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 1:
            yield f"{type(criterion).__name__} {index}", weight


def _counts_all(path: str, value: int, shift: int, batch: Any) -> bool:
    return bool(entries_unlike(path, value, shift, batch).all())


def rule_error(
    rule: LossRule, whole: float, parts: Sequence[float], weights: Sequence[float]
) -> float:
    """Return how far the loss of some samples is from what a rule makes of the losses of its parts.

    Args:
        rule: The rule.
        whole: Loss of all the samples.
        parts: Losses of the parts.
        weights: Weights of the parts by the rule.

    Returns:
        The difference, relative to the largest of the losses.
    """
    scale = max(abs(whole), *map(abs, parts)) or 1.0
    if rule.is_sum:
        return abs(whole - sum(parts)) / scale
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        return float("inf")
    pairs = zip(weights, parts, strict=True)
    return abs(whole - sum(w * loss / total for w, loss in pairs if w > 0)) / scale


def choose_rule(errors: Mapping[str, float], tolerance: float) -> list[str]:
    """Return the names of the rules that fit, the chosen one first; empty if none does.

    Args:
        errors: Name of a rule -> largest error on any replica, in the order of the rules. The first
            one holds unless another one fits much better.
        tolerance: Errors up to it are rounding.
    """
    fitting = [name for name, error in errors.items() if error <= tolerance]
    if not fitting:
        return []
    first, best = next(iter(errors)), min(fitting, key=errors.__getitem__)
    if first not in fitting or errors[first] > max(10 * errors[best], tolerance / 100):
        # Of those that fit equally well, the likely one stands first.
        near = [n for n in fitting if errors[n] <= max(10 * errors[best], tolerance / 100)]
        return [near[0], *(n for n in fitting if n != near[0])]
    return [first, *(n for n in fitting if n != first)]
