"""How the loss of a batch is made of the losses of its parts: weights that a run declares or finds.

Note [Finding the rule]: the loss of a few samples is compared with the losses of two parts of them.
Of the rules that a loss usually follows (mean over samples, sum, mean over the labels that count,
mean weighted by an entry) it shows which one it follows. Two rules that weigh all samples alike so
far are told apart in the first batch for which they differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.batch import batch_entry, BatchDims, count_valid
from lightning_par.errors import PlanError
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = ["LossRule", "Seen", "candidate_rules", "choose_rule", "declared_rule", "rule_error"]

_MARK = -100
"""The label that PyTorch's losses ignore by default; it has no other use."""


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How the loss of a batch is made of the losses of its parts.

    Attributes:
        name: What the loss is, for messages: "the mean over the samples".
        weigh: Part of a batch, and its number of samples -> its weight, a float64 scalar.
        declare: What to write in a `BatchLayout` to declare it.
        is_sum: Whether the losses of the parts are added instead of averaged by their weights.
        counts_all: Whether every sample has a weight, so that no part weighs 0.
        is_uniform: Batch -> whether all its samples weigh alike.
        is_likely: Whether parts are chosen so as to tell it from others.
    """

    name: str
    weigh: Callable[[Any, int], Tensor]
    declare: str
    is_sum: bool = False
    counts_all: bool = False
    is_uniform: Callable[[Any], bool] = lambda _: False
    is_likely: bool = True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What running the step on some batches gave.

    Attributes:
        losses: Its losses, for each batch one of every backward.
        logs: The numbers that it logged, for each batch.
    """

    losses: list[tuple[float, ...]]
    logs: list[dict[str, float]]


def declared_rule(layout: BatchLayout) -> LossRule:
    """Return the rule that `layout` declares, or what it is without a declaration.

    Args:
        layout: Its `loss_weight`, or else `labels`, decides.
    """
    weight = layout.loss_weight
    if weight == "samples" or (weight is None and layout.labels is None):
        return _SAMPLES
    if weight == "sum":
        return _SUM
    if weight is None or weight == "labels":
        return LossRule(
            name=f"the mean over the labels {layout.labels!r} that count",
            weigh=partial(_valid, layout),
            declare="loss_weight='labels'",
        )
    if callable(weight):
        name = getattr(weight, "__qualname__", type(weight).__name__)
        rule = f"the mean weighted by {name}"
        return LossRule(name=rule, weigh=partial(_called, weight), declare=f"loss_weight={name}")
    return LossRule(
        name=f"the mean weighted by {weight!r}",
        weigh=partial(_entry_sum, weight),
        declare=f"loss_weight={weight!r}",
    )


def _samples(batch: Any, samples: int) -> Tensor:
    return torch.tensor(float(samples), dtype=torch.float64)


_SAMPLES = LossRule(
    name="the mean over the samples",
    weigh=_samples,
    declare="loss_weight='samples'",
    counts_all=True,
    is_uniform=lambda _: True,
)
_SUM = replace(_SAMPLES, name="the sum over the samples", declare="loss_weight='sum'", is_sum=True)


def _valid(layout: BatchLayout, batch: Any, samples: int) -> Tensor:
    return count_valid(batch, layout)


def _called(weight: Callable[[Any], Any], batch: Any, samples: int) -> Tensor:
    value = torch.as_tensor(weight(batch), dtype=torch.float64)
    if value.numel() != 1:
        raise PlanError(
            f"loss_weight={getattr(weight, '__qualname__', weight)!r} returned a tensor of shape "
            f"{tuple(value.shape)}; it has to return one number, the weight of the batch."
        )
    return value.reshape(())


def _entry_sum(path: str, batch: Any, samples: int) -> Tensor:
    return torch.as_tensor(batch_entry(batch, path)).sum(dtype=torch.float64)


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
    rules = [declared_rule(layout), _SAMPLES]
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
                weigh=partial(_count, path, value, shift),
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
            weigh=partial(_class_sum, path, weight),
            declare="loss_weight=... (a function of the batch)",
        )
        for path, _ in integers
        for name, weight in classes.items()
    ]
    return list({rule.name: rule for rule in [*rules, _SUM]}.values())


def _summed(entries: Sequence[tuple[str, int]]) -> Iterator[LossRule]:
    for path, ndim in entries:
        if path and ndim <= 2:
            yield LossRule(
                name=f"the mean weighted by {path!r}",
                weigh=partial(_entry_sum, path),
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


def _counted(path: str, value: int, shift: int, batch: Any) -> Tensor:
    entry: Tensor = batch_entry(batch, path) if path else batch
    return (entry[:, shift:] if shift else entry) != value


def _count(path: str, value: int, shift: int, batch: Any, samples: int) -> Tensor:
    return _counted(path, value, shift, batch).sum(dtype=torch.float64)


def _counts_all(path: str, value: int, shift: int, batch: Any) -> bool:
    return bool(_counted(path, value, shift, batch).all())


def _class_sum(path: str, weight: Tensor, batch: Any, samples: int) -> Tensor:
    labels: Tensor = batch_entry(batch, path) if path else batch
    counts = (labels >= 0) & (labels < len(weight))
    return weight.to(labels.device)[labels[counts]].sum(dtype=torch.float64)


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
