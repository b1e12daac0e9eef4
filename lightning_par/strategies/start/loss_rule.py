"""Which rule makes the loss of a batch of the losses of its parts, where a run has to find it.

Note [Finding the rule]: the loss of a few samples is compared with the losses of two parts of them.
Of the rules that a loss usually follows (mean over samples, sum, mean over the labels that count,
mean weighted by an entry) it shows which one it follows. Rules that weigh these samples alike, or
nearly so, are told apart by what the step calls (a cross-entropy says which labels it takes the
mean of), else on copies of the samples some of whose labels are masked (`contrast.py`), else in the
first batch for which they differ, in one replica or between several.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.batch import batch_entry, BatchDims, take_samples
from lightning_par.errors import PlanError
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
from lightning_par.strategies.step.step_report import StepReport

__all__ = [
    "candidate_rules",
    "choose_parts",
    "choose_rule",
    "errors_of",
    "have_no_loss",
    "rows_of_a_step",
    "rule_error",
    "rule_of_labels",
]

_ROWS = 16
"""Samples of a batch from which the parts are chosen."""
_FLOOR = 5e3
"""Times the tolerance, by the loss: a smaller term that follows no rule may be rounding."""
_MARK = -100
"""The label that PyTorch's losses ignore by default; it has no other use."""


def _has_equal_rows(path: str, batch: Any) -> bool:
    entry: Tensor = batch_entry(batch, path)
    rows = entry.flatten(1).sum(1) if entry.ndim > 1 else entry
    # One row for each sample: equal sums weigh all samples alike.
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
        if not isinstance(entry, Tensor) or dim != 0 or entry.layout is not torch.strided:
            continue
        is_index = not (
            entry.is_floating_point() or entry.is_complex() or entry.dtype == torch.bool
        )
        (integers if is_index else numbers).append((path, entry.ndim))
    criterions = [m for m in module.modules() if isinstance(m, nn.CrossEntropyLoss | nn.NLLLoss)]
    values = [getattr(criterion, "ignore_index", None) for criterion in criterions]
    ignored = {value for value in values if isinstance(value, int)}
    # -100 first, which has no other use; 0 last, as it is mostly a class or a padding token.
    for value in dict.fromkeys([_MARK, *sorted(ignored - {_MARK}), 0]):
        rules += [
            replace(rule_of_labels(path, value, shift), is_likely=value == _MARK and not shift)
            for path, ndim in integers
            # Causal models compare the logits at t with the label at t + 1: the first column
            # counts nowhere.
            for shift in range(2 if ndim > 1 else 1)
        ]
    rules += list(_summed(numbers))
    rules += list(_lengths(integers))
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
    # By name, as a declared rule may be one of the others; the first one stays.
    return list({rule.name: rule for rule in [*rules, SUM_OVER_SAMPLES]}.values())


def rule_of_labels(path: str, value: int, shift: int) -> LossRule:
    """Return the mean over the labels of an entry that differ from a value.

    Args:
        path: The entry.
        value: The label that is ignored.
        shift: Columns at its beginning that are left out.
    """
    return LossRule(
        name=f"the mean over {path or 'the batch'!r} != {value}" + " (shifted)" * shift,
        weigh=partial(count_entries, path, value, shift),
        declare=f"labels={path!r}, ignore_index={value}" + ", label_shift=1" * shift,
        is_uniform=partial(_counts_all, path, value, shift),
        path=path,
        ignored=value,
        shift=shift,
    )


def _summed(entries: Sequence[tuple[str, int]]) -> Iterator[LossRule]:
    for path, ndim in entries:
        # A tensor with more dims, as an image, is no weight of samples or tokens.
        if path and ndim <= 2:
            yield LossRule(
                name=f"the mean weighted by {path!r}",
                weigh=partial(sum_of_entry, path),
                declare=f"loss_weight={path!r}",
                is_uniform=partial(_has_equal_rows, path),
                path=path,
            )


def _lengths(entries: Sequence[tuple[str, int]]) -> Iterator[LossRule]:
    """Give rules by which one whole number for each sample says how many tokens count."""
    # [B, T]: the entry that has a token dim.
    tokens = next((path for path, ndim in entries if ndim == 2), None)
    for path, ndim in entries:
        if path and ndim == 1:
            name = f"the mean over the numbers of tokens in {path!r}"
            weigh, alike = partial(sum_of_entry, path), partial(_has_equal_rows, path)
            yield LossRule(
                name=name, weigh=weigh, declare=f"loss_weight={path!r}", is_uniform=alike, path=path
            )
            if tokens is not None:
                yield LossRule(
                    name=f"the mean over the tokens after the first {path!r} ones",
                    weigh=partial(_tokens_after, path, tokens),
                    declare="loss_weight=... (a function of the batch)",
                    is_uniform=alike,
                    path=path,
                )


def _tokens_after(path: str, tokens: str, batch: Any, samples: int) -> Tensor:
    first: Tensor = batch_entry(batch, path)
    length = batch_entry(batch, tokens).shape[1]
    count: Tensor = (length - first).clamp(min=0).sum(dtype=torch.float64)
    return count


def _class_weights(
    batch: Any, dims: BatchDims, criterions: Sequence[nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    # An entry without a batch dim may hold the weights of the classes: [C].
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
    # Relative to the losses, as they are summed: 0 by 0 is no error.
    scale = max(abs(whole), *map(abs, parts)) or 1.0
    total = sum(weights)
    if rule.is_sum:
        error = abs(whole - sum(parts)) / scale
    elif total <= 0 or min(weights) < 0:
        error = math.nan  # by such a rule the loss of these samples would not exist
    else:
        pairs = zip(weights, parts, strict=True)
        # Only parts that weigh something: the loss of others may be NaN.
        error = abs(whole - sum(w * loss / total for w, loss in pairs if w > 0)) / scale
    # A rule by which a part without a loss weighs something does not hold; another one may. Where
    # the loss of the batch is no number, nothing is known.
    return math.inf if math.isnan(error) and math.isfinite(whole) else error


def choose_rule(errors: Mapping[str, float], tolerance: float) -> list[str]:
    """Return the names of the rules that fit equally well, the likely one first; empty if none
    does.

    Args:
        errors: Name of a rule -> largest error on any replica, in the order of the rules, the
            likely ones first.
        tolerance: Errors up to it are rounding. Of two rules within it, one may still fit much
            better, unless both differ by next to nothing.
    """
    best = min(errors.values(), default=math.inf)
    # `not <=`, so that NaN fits nothing.
    if not best <= tolerance:
        return []
    # Of rules that fit, those are kept whose error is of the size of the smallest one, or which
    # is rounding: with 16-bit losses a tenth of the tolerance is still rounding.
    nothing = tolerance / (10 if tolerance > 1e-3 else 100)
    return [name for name, error in errors.items() if error <= max(10 * best, nothing)]


def choose_parts(
    batch: Any, dims: BatchDims, microbatches: int, rules: Sequence[LossRule]
) -> list[tuple[Any, int]]:
    """Return some samples and two parts of them, for which the rules differ most; each with its
    number of samples.
    """
    assert dims.size is not None
    # A step may not bear a single sample, unless micro-batches have no more.
    half = 2 if dims.size >= 4 and dims.size // microbatches >= 2 else 1
    count = min(dims.size, _ROWS)
    rows = [take_samples(batch, dims, [index]) for index in range(count)]
    orders = [list(range(count))]
    for rule in rules:
        try:
            weights = [float(rule.weigh(row, 1)) for row in rows]
        except PlanError:  # as of a step that cuts its batch by itself
            continue
        if len(set(weights)) > 1:
            # Sorted by weight, the lightest and the heaviest samples are the ends: there rules
            # differ most.
            orders.append(sorted(range(count), key=weights.__getitem__))

    def parts_of(order: Sequence[int]) -> list[tuple[Any, int]]:
        # In the order of the batch, as positions may matter to the step.
        low, high = sorted(order[:half]), sorted(order[-half:])
        return [(take_samples(batch, dims, part), len(part)) for part in (low + high, low, high)]

    def distinct(order: Sequence[int]) -> tuple[int, int]:
        """How many rules differ for these parts, of the likely ones and of all."""
        _, *halves = parts_of(order)
        weights = [[float(rule.weigh(*part)) for part in halves] for rule in rules]
        # Rounded, as the shares of equal rules may differ in the last bit.
        shares = [round(w[0] / max(sum(w), 1e-30), 6) for w in weights]
        likely = [share for share, rule in zip(shares, rules, strict=True) if rule.is_likely]
        # Likely rules first: it is more use to tell those apart than all the unlikely ones.
        return len({*likely}), len({*shares})

    return parts_of(max(orders, key=distinct))


def errors_of(
    rules: Sequence[LossRule],
    seen: StepReport,
    parts: Sequence[tuple[Any, int]],
    tolerance: float,
) -> dict[str, float]:
    """Return the error of every rule, the largest of all losses of a step and of their terms;
    nothing if the parts have other numbers of them, or none, or if all are 0, which every rule
    makes of 0.

    Args:
        rules: The rules.
        seen: What the step did on some samples and on parts of them.
        parts: The parts, with their numbers of samples.
        tolerance: Errors up to it are rounding.
    """
    # Manual optimization may run another number of backwards on a part.
    if len({len(losses) for losses in seen.losses}) > 1 or not any(map(any, seen.losses)):
        return {}
    weights = {rule.name: [float(rule.weigh(*part)) for part in parts] for rule in rules}

    def errors(column: Sequence[float]) -> dict[str, float]:
        return {r.name: rule_error(r, column[0], column[1:], weights[r.name]) for r in rules}

    found = []
    for number, column in enumerate(zip(*seen.losses, strict=True)):
        found.append(errors(column))
        terms = [each[number] for each in seen.terms]
        if len({*map(len, terms)}) != 1:
            continue
        for term in zip(*terms, strict=True):
            size = _size(term) / min(1.0, _FLOOR * tolerance) / (_size(column) or 1.0)
            each = errors(term)
            # One that follows no rule may be nothing but rounding, where it is small.
            is_other = min(each.values()) > tolerance or tolerance > 1e-3
            factor = min(1.0, size) if is_other else 1.0
            found.append({name: error * factor for name, error in each.items()} if size else {})
    return {rule.name: max(each.get(rule.name, 0.0) for each in found) for rule in rules}


def rows_of_a_step(samples: int, microbatches: int) -> list[list[int]]:
    """Return the places of some samples of a batch, and of those in each of several parts of them,
    which are as large as those of a step: of smaller ones nothing may ever count.

    Args:
        samples: Of the batch; at least 2.
        microbatches: Into how many it is cut.
    """
    most = min(samples, _ROWS)
    size = min(most // 2, max(1, samples // microbatches))
    rows = [*range(most // size * size)]
    return [rows, *(rows[i : i + size] for i in rows[::size])]


def have_no_loss(errors: Mapping[str, float], samples: int, microbatches: int) -> bool:
    """Return whether the parts of `rows_of_a_step` have no loss while the whole has one, and those
    of a step are no larger.

    Args:
        errors: Name of a rule -> its error.
        samples: Of the batch; 0: unknown.
        microbatches: Into how many it is cut.
    """
    is_large = 0 < samples // microbatches <= min(samples, _ROWS) // 2
    return is_large and {*errors.values()} == {math.inf}


def _size(column: Sequence[float]) -> float:
    return max((abs(value) for value in column if math.isfinite(value)), default=0.0)
