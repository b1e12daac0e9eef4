"""Which rule makes the loss of a batch, by what its step was seen to call.

See Note [Finding the rule] in `loss_rule.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.batch import batch_entry, BatchDims
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.errors import PlanError
from lightning_par.observe.batch_tape import TapedTensor
from lightning_par.observe.cross_entropies import SeenLoss, SeenWeight
from lightning_par.strategies.start.loss_rule import rule_of_labels
from lightning_par.strategies.step.batch_weights import (
    class_weights_of,
    LossRule,
    MEAN_OVER_SAMPLES,
    sum_of_class_weights,
)
from lightning_par.strategies.step.step_report import StepReport

__all__ = ["common_ratios", "labels_seen", "ratios_seen", "rules_made", "rules_seen"]

_Seen = TypeVar("_Seen")
_DECLARE = "loss_weight=... (a function of the batch)"


def rules_made(
    rules: Sequence[LossRule], seen: StepReport, parts: Sequence[tuple[Any, int]], dims: BatchDims
) -> list[LossRule]:
    """Return rules that are known only once the step was seen: of labels that it masks by itself,
    of the label that its cross-entropy ignores, of numbers by which it divides.

    Args:
        rules: Those that are known.
        seen: What the step did on the parts.
        parts: Some samples and parts of them, as they were before the step.
        dims: Which entries of the batch have a batch dim.
    """
    batch = parts[0][0]
    paths = {id(batch_entry(batch, path) if path else batch): path for path in dims.dims}
    names = [paths.get(id(tensor)) for tensor in tensors_of(batch)]
    found = [*_of_labels(rules, seen, parts, names), *_of_weights(seen, parts, names)]
    known = {rule.name for rule in rules}
    return list({rule.name: rule for rule in found if rule.name not in known}.values())


def _of_labels(
    rules: Sequence[LossRule],
    seen: StepReport,
    parts: Sequence[tuple[Any, int]],
    names: Sequence[str | None],
) -> Iterator[LossRule]:
    """Give the rules of the labels of cross-entropies with a mean."""
    for calls in _columns(seen.calls):
        first = calls[0]
        path = None if first.place is None else names[first.place]
        if first.classes is not None and (path is not None or first.made is not None):
            yield _rule_of_classes(first, path)
        if not first.is_mean:
            continue
        known = list(rules)
        if path is not None:
            shifts = range(min(batch_entry(parts[0][0], path).ndim if path else 2, 2))
            known += (new := [rule_of_labels(path, first.ignored, shift) for shift in shifts])
            yield from new
        pairs = list(zip(parts, calls, strict=True))
        # Labels that are an entry as it is are named by it.
        is_entry = any(all(_is_entry(rule, part[0], c) for part, c in pairs) for rule in known)
        if first.made is None or (first.made.only_moves and is_entry):
            continue
        taped = _variant(first.made, partial(_makes_labels, parts, calls))
        if taped is not None:
            what = f"the labels != {first.ignored} that the step computes from"
            yield LossRule(
                name=f"the mean over {what} {_listed(taped, names)}",
                weigh=partial(_weigh_made, taped, partial(_count_unlike, first.ignored)),
                declare=_DECLARE,
                ignored=first.ignored,
                labels=partial(_made, taped),
                is_made=True,
            )


def _rule_of_classes(call: SeenLoss, path: str | None) -> LossRule:
    assert call.classes is not None
    classes = call.classes.clone()
    if 0 <= call.ignored < len(classes):
        classes[call.ignored] = 0
    if path is None:
        assert call.made is not None
        weigh = partial(_weigh_made, call.made, partial(class_weights_of, weight=classes))
    else:
        weigh = partial(sum_of_class_weights, path, classes)
    name = "the mean weighted by the class weights that cross_entropy takes"
    return LossRule(name=name, weigh=weigh, declare=_DECLARE, is_made=True)


def _of_weights(
    seen: StepReport, parts: Sequence[tuple[Any, int]], names: Sequence[str | None]
) -> Iterator[LossRule]:
    """Give the rules of what a step divides by, and of the entries that it chooses."""
    for index, weights in enumerate(_columns(seen.weights)):
        taped = _variant(weights[0].made, partial(_makes_weights, parts, weights))
        if taped is not None and len({weight.chooses for weight in weights}) == 1:
            chooses = weights[0].chooses
            what = "weighted by a value that the step computes from"
            what = "over the entries that the step selects by" if chooses else what
            number = f" ({index + 1})" * (len(seen.weights[0]) > 1)
            yield LossRule(
                name=f"the mean {what} {_listed(taped, names)}{number}",
                weigh=partial(_weigh_made, taped, _sum),
                declare=_DECLARE,
                is_made=True,
            )


def _columns(calls: Sequence[Sequence[_Seen]]) -> Iterator[tuple[_Seen, ...]]:
    """Give each call of a step on all parts; nothing if the parts do not make the same ones."""
    yield from zip(*calls, strict=True) if len({*map(len, calls)}) == 1 else ()


def _variant(taped: TapedTensor | None, fits: Callable[[TapedTensor], bool]) -> TapedTensor | None:
    """Return how a tensor is made of any batch; None: not of the batch alone.

    A whole number among the calls that is a length of one batch by chance is not in its parts.
    """
    variants = [] if taped is None or not taped.calls else taped.variants()
    return next(filter(fits, variants), None)


def _made_of_parts(taped: TapedTensor, parts: Sequence[tuple[Any, int]]) -> list[Tensor]:
    """Return what is made of each part; nothing if lengths do not fit."""
    try:
        return [taped.make(batch) for batch, _ in parts]
    except Exception:  # of torch, of any kind
        return []


def _makes_labels(
    parts: Sequence[tuple[Any, int]], calls: Sequence[SeenLoss], taped: TapedTensor
) -> bool:
    made = [labels.flatten().cpu() for labels in _made_of_parts(taped, parts)]
    return bool(made) and all(map(torch.equal, made, [call.labels for call in calls]))


def _makes_weights(
    parts: Sequence[tuple[Any, int]], weights: Sequence[SeenWeight], taped: TapedTensor
) -> bool:
    values = _made_of_parts(taped, parts)
    made = [float(each.sum()) for each in values]
    if not weights[0].chooses and _is_cut(values, parts):
        return False  # each sample is divided by its own number
    # A bound at its end (`clamp(min=1)`) is left out of what is made.
    pairs = zip(made, weights, strict=bool(made))
    fits = [math.isclose(one, other.value, rel_tol=1e-5) or not one for one, other in pairs]
    return bool(fits) and all(fits)


def _is_cut(values: Sequence[Tensor], parts: Sequence[tuple[Any, int]]) -> bool:
    """Whether what is made of a batch has as many numbers for each of its samples."""
    return len({each.numel() / count for each, (_, count) in zip(values, parts, strict=False)}) == 1


def _listed(taped: TapedTensor, names: Sequence[str | None]) -> str:
    return " and ".join(repr(names[each] or "the batch") for each in taped.entries)


def _made(taped: TapedTensor, batch: Any) -> Tensor:
    try:
        return taped.make(batch)
    except Exception as error:  # of torch, of any kind
        raise PlanError(
            "LP309",
            "the loss of training_step weights each batch by a number that is computed from the "
            "batch, such as its number of labels. lightning_par has recorded the operations that "
            f"compute this number, but for this batch they fail with {type(error).__name__}: "
            f"{error}. Declare ParallelPlan(batch=BatchLayout(loss_weight=...)) with a function "
            "that takes a batch and returns its weight.",
        ) from error


def _weigh_made(
    taped: TapedTensor, weigh: Callable[[Tensor], Tensor], batch: Any, samples: int
) -> Tensor:
    """Weigh a part of a batch by what the step makes of it; one of another loop by its samples."""
    if not taped.takes(batch):
        return MEAN_OVER_SAMPLES.weigh(batch, samples)
    return weigh(_made(taped, batch))


def _count_unlike(ignored: int, labels: Tensor) -> Tensor:
    return (labels != ignored).sum(dtype=torch.float64)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def rules_seen(
    rules: Sequence[LossRule], seen: StepReport, parts: Sequence[tuple[Any, int]]
) -> frozenset[str] | None:
    """Return the names of the rules that a loss follows if it is one cross-entropy with a mean;
    None if it is not.

    Args:
        rules: The rules that it may follow.
        seen: What the step did on the batches.
        parts: The batches, with their numbers of samples.
    """
    # Calls are compared one by one: each batch has to make the same ones.
    if any(len(loss) != 1 for loss in seen.losses) or len({*map(len, seen.calls)}) != 1:
        return None
    # Another term may be too small to be seen in the sum.
    if any(sum(term != 0 for term in terms) > 1 for each in seen.terms for terms in each):
        return None
    for calls in zip(*seen.calls, strict=True):
        pairs = [(call.value, loss[0]) for call, loss in zip(calls, seen.losses, strict=True)]
        # A loss that is a call's value times a constant is its mean; with another term, the
        # factor would change from batch to batch.
        if not all(call.is_mean for call in calls) or not _are_proportional(pairs):
            continue
        # The number of labels that a cross-entropy takes its mean over.
        counts = [float((call.labels != call.ignored).sum()) for call in calls]
        fitting = [
            rule
            for rule in rules
            if all(float(rule.weigh(*part)) == n for part, n in zip(parts, counts, strict=True))
        ]
        named = [
            rule
            for rule in fitting
            if rule.ignored == calls[0].ignored
            and all(_is_entry(rule, part[0], c) for part, c in zip(parts, calls, strict=True))
        ]
        # What the step was seen to make is told by its calls, and not by equal numbers.
        named = [rule for rule in named if rule.labels] or named
        # Labels that the step copied may come from any entry that has as many.
        moved = all(
            call.place is not None or (call.made and call.made.only_moves) for call in calls
        )
        is_sure = any(rule.labels or moved for rule in named)
        return frozenset(rule.name for rule in (named if is_sure else fitting))
    return None


def labels_seen(
    rules: Sequence[LossRule],
    seen: Sequence[Sequence[SeenLoss]],
    parts: Sequence[tuple[Any, int]],
) -> frozenset[str]:
    """Return the entries of a batch that a cross-entropy takes as labels, as they are: these may
    hold the label that it ignores.
    """
    return frozenset(
        rule.path
        for rule in rules
        for calls, part in zip(seen, parts, strict=False)
        for call in calls
        if rule.path is not None
        and rule.ignored == call.ignored
        and call.place is not None
        and _is_entry(rule, part[0], call)
    )


def ratios_seen(
    rules: Sequence[LossRule],
    seen: Sequence[Sequence[SeenLoss]],
    parts: Sequence[tuple[Any, int]],
) -> dict[str, frozenset[float]]:
    """Return, for each rule that not every sample counts for, how many labels the cross-entropies
    of a step take their mean over, as multiples of what the rule gives: those that are the same for
    all parts.
    """
    found = {}
    for rule in rules:
        weights = [float(rule.weigh(*part)) for part in parts]
        ratios = [1.0] if rule.is_made and rule.labels is None else []
        for calls in _columns(seen):
            pairs = [
                (float((call.labels != call.ignored).sum()), weight)
                for call, weight in zip(calls, weights, strict=True)
                if weight
            ]
            if pairs and all(call.is_mean for call in calls) and _are_proportional(pairs):
                ratios.append(pairs[0][0] / pairs[0][1])
        if ratios and not rule.counts_all and not rule.is_sum:
            found[rule.name] = frozenset(ratios)
    return found


def common_ratios(found: Sequence[Mapping[str, frozenset[float]]]) -> dict[str, frozenset[float]]:
    """Return the ratios that were seen on all replicas, from `ratios_seen` of each."""
    names = set(found[0]).intersection(*found)
    return {name: frozenset.intersection(*(ratios[name] for ratios in found)) for name in names}


def _are_proportional(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether losses are the values of a call, or all the same number of times that."""
    # Equal bits, which is the usual case; also where all are 0.
    if all(value == loss for value, loss in pairs):
        return True
    factors = [loss / value for value, loss in pairs if value]
    # One pair has a factor in any case, and a value of 0 has none.
    if len(factors) < 2 or len(factors) < len(pairs):
        return False
    return max(factors) - min(factors) <= 1e-6 * abs(factors[0])


def _is_entry(rule: LossRule, batch: Any, call: SeenLoss) -> bool:
    """Whether a rule counts the labels of a call, which may have been shifted."""
    if rule.labels is not None:
        return torch.equal(rule.labels(batch).flatten().cpu(), call.labels)
    if rule.path is None:
        return False
    entry = batch_entry(batch, rule.path) if rule.path else batch
    if not isinstance(entry, Tensor):
        return False
    # `place` is where among the tensors of the batch the labels were found by identity.
    if call.place is not None and list(tensors_of(batch))[call.place] is not entry:
        return False
    entry = entry.cpu()
    if not rule.shift:
        return torch.equal(entry.flatten(), call.labels)
    shifted = entry[:, 1:]
    # A step either drops the last position of the logits, or pads the labels by the ignored one.
    padded = F.pad(shifted, (0, 1), value=call.ignored) if shifted.ndim == 2 else shifted
    return any(torch.equal(found.flatten(), call.labels) for found in (shifted, padded))
