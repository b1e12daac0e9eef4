"""What the numbers that a step logs tell of how they are means over a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.start.loss_rule import choose_rule, errors_of
from lightning_par.strategies.start.seen_rules import rules_seen
from lightning_par.strategies.step.batch_weights import BatchWeigher, LossRule, MEAN_OVER_SAMPLES
from lightning_par.strategies.step.metrics import compare_metrics
from lightning_par.strategies.step.runner import StepRunner
from lightning_par.strategies.step.step_report import StepReport
from lightning_par.strategies.step.step_traces import (
    compare_parts,
    LogCall,
    MEAN_OF_SAMPLES,
    NOT_OF_PARTS,
    reduction_name,
    SAME_KIND,
    SUM_OF_PARTS,
)

__all__ = ["judge_logs", "learn_rule"]


def judge_logs(
    weigher: BatchWeigher,
    mesh: ParallelMesh,
    decisions: Decisions,
    tolerance: Callable[[], float],
    seen: StepReport,
    parts: Sequence[tuple[Any, int]],
    microbatches: int,
) -> frozenset[str]:
    """Learn how logged numbers and metrics follow from parts of a batch; return which do not.

    Args:
        weigher: Is told what was learnt.
        mesh: Of this run.
        decisions: Where it is noted.
        tolerance: Gives the relative difference that roundings may make.
        seen: What the step did on some samples and on parts of them.
        parts: These, with their numbers of samples.
        microbatches: Into how many a batch is cut. Replicas log together what `sync_dist` asks.

    **Communicates**: a number over the replicas; and the names, if there are such.
    """
    kinds: dict[str, int] | None = None
    sized: dict[str, bool] = {}
    hides = False
    # A prediction has no labels to weigh by.
    if len(parts) > 1 and (any(seen.logs) or any(seen.metrics)):
        logs = [[c for c in made if microbatches > 1 or _is_joined(c)] for made in seen.logs]
        weighted = torch.stack([weigher.rule.weigh(*p).double().cpu() for p in parts[1:]])
        counts = [count for _, count in parts[1:]]
        kinds = compare_parts(logs, weighted, tolerance(), counts)
        if mesh.sizes.data > 1:
            kinds |= _added_over_replicas(logs[0], kinds)
        sized = _sized_by_samples(logs, weighted, [parts[0][1], *counts])
        # A number that is 0 is the sum of parts as well as their mean.
        weigher.judged |= {call.name for call in logs[0] if call.value}
        hides = _hides(logs)
        kinds |= compare_metrics(*seen.metrics, tolerance())
        # A batch that is not full has fewer micro-batches, and so fewer updates, but as many
        # replicas as the others.
        for name, kind in compare_metrics(*seen.states, tolerance()).items():
            kinds[name] = max(kinds.get(name, SAME_KIND), kind if microbatches > 1 else SAME_KIND)
    held, weigher.hides_logs = [(kinds, sized)], hides
    if mesh.sizes.data > 1:
        tells = torch.tensor(max([*(kinds or {}).values(), *sized.values()], default=0))
        dist.all_reduce(tells, dist.ReduceOp.MAX, group=mesh.data_group)
        if tells == SAME_KIND:
            return frozenset()
        held *= mesh.sizes.data
        dist.all_gather_object(held, (kinds, sized), group=mesh.data_group)
    known = [found for found, _ in held if found is not None]
    weigher.sized |= _sized_on_all([names for found, names in held if found is not None])
    by_name = {name: {found.get(name) for found in known} for found in known for name in found}
    weigher.sums |= {name for name, kind in by_name.items() if kind == {SUM_OF_PARTS}}
    means = {name for name, kind in by_name.items() if kind <= {SAME_KIND, MEAN_OF_SAMPLES}}
    weigher.by_samples |= {name for name in means if MEAN_OF_SAMPLES in by_name[name]}
    if named := ", ".join(sorted(weigher.by_samples)):
        decisions.add("logs", f"{named} weighted by samples, others like the loss")
    mixed = {n for n, kind in by_name.items() if MEAN_OF_SAMPLES in kind and n not in means}
    return frozenset(n for n, kind in by_name.items() if NOT_OF_PARTS in kind or n in mixed)


def learn_rule(
    steps: StepRunner,
    rules: Sequence[LossRule],
    seen: StepReport,
    parts: Sequence[tuple[object, int]],
    tolerance: float,
) -> None:
    """Give the weigher the rule of a mean that an evaluation step logs, where no training step has
    shown one: means over labels are then no means over samples.

    Args:
        steps: Of this run. Nothing is learnt where the weight of the loss is declared, or known.
        rules: Those that the mean may follow, the same on every replica.
        seen: What the step did on some samples and on parts of them.
        parts: These, with their numbers of samples.
        tolerance: Of roundings, relative.

    **Communicates**: an object over the replicas.
    """
    weigher, mesh, layout = steps.weigher, steps.mesh, steps.batch_layout
    if layout.labels or layout.loss_weight or weigher.rule is not MEAN_OVER_SAMPLES:
        return
    means = [rule for rule in rules if not rule.is_sum]
    own = {
        name: (errors_of(means, one, parts[1:], tolerance), rules_seen(means, one, parts))
        for name, one in _alone(seen).items()
        if len(parts) > 1
    }
    every = [own] * mesh.sizes.data
    dist.all_gather_object(every, own, group=mesh.data_group)
    for name in own if all(found.keys() == own.keys() for found in every) else ():
        found = [one[name] for one in every]
        errors = {
            rule.name: max(each.get(rule.name, math.inf) for each, _ in found) for rule in means
        }
        fitting = choose_rule(errors, tolerance)
        shown = frozenset(fitting).intersection(*(names or () for _, names in found))
        if MEAN_OVER_SAMPLES.name in fitting:  # also where all samples have as many labels
            fitting = [one for one in fitting if one in shown]
        if fitting and MEAN_OVER_SAMPLES.name not in fitting:
            weigher.rule = next(rule for rule in means if rule.name == fitting[0])
            return


def _alone(seen: StepReport) -> dict[str, StepReport]:
    """Return each mean that is logged, as if it were the loss of the step."""
    found: dict[str, StepReport] = {}
    for call in seen.logs[0]:
        kind = reduction_name(call.options.get("reduce_fx", "mean"))
        values = [tuple(c.value for c in made if c.name == call.name) for made in seen.logs]
        if kind in ("mean", "avg") and all(len(value) == 1 for value in values):
            found[call.name] = replace(seen, losses=values, terms=[])
    return found


def _added_over_replicas(calls: Sequence[LogCall], kinds: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of a batch that Lightning adds over replicas, as nothing of the kind."""
    means = [c for c in calls if kinds.get(c.name) == MEAN_OF_SAMPLES and _is_joined(c)]
    sums = (c for c in means if reduction_name(c.options.get("reduce_fx", "mean")) == "sum")
    return {call.name: NOT_OF_PARTS for call in sums}


def _hides(logs: Sequence[Sequence[LogCall]]) -> bool:
    """Return whether a number is the same for the batch and its parts, as an F1 of samples that are
    all wrong: other batches may tell what it is. One that is no tensor is mostly a constant, such
    as a learning rate, unless it is 0.
    """
    values: dict[str, set[float]] = {}
    for call in (call for made in logs for call in made):
        kind = reduction_name(call.options.get("reduce_fx", "mean"))
        if kind in ("mean", "avg") and "()" not in call.name:
            constant = {math.nan} if call.is_plain and call.value else set()
            values.setdefault(call.name, set()).update({call.value} | constant)
    return any(len(found) == 1 for found in values.values())


def _is_joined(call: LogCall) -> bool:
    """Return whether a number is joined over the replicas: one that is logged with ``sync_dist``,
    or is in the result of a step, of which hooks get that of all replicas.
    """
    return bool(call.options.get("sync_dist")) or "()" in call.name


def _sized_by_samples(
    logs: Sequence[Sequence[LogCall]], weights: Tensor, samples: Sequence[int]
) -> dict[str, bool]:
    """Return the names of numbers that the batch and its parts log with a `batch_size` equal to
    their samples; and whether parts weigh otherwise, so that `compare_parts` tells means apart.

    Args:
        logs: From `numbers_of`, of the batch and of each of its parts.
        weights: [m] weights of the parts, as those of the loss.
        samples: Numbers of samples of the batch and of each of its parts.
    """
    sizes: dict[str, set[bool]] = {}
    for made, count in zip(logs, samples, strict=True):
        for call in made:
            sizes.setdefault(call.name, set()).add(call.options.get("batch_size") == count)
    counts = torch.tensor([*samples[1:]], dtype=weights.dtype)
    tells = not bool(torch.allclose(counts / counts.sum(), weights / weights.sum()))
    return {name: tells for name, equal in sizes.items() if equal == {True}}


def _sized_on_all(replicas: Sequence[Mapping[str, bool]]) -> frozenset[str]:
    """Return the names that `_sized_by_samples` has found on all replicas, and told on one."""
    told = frozenset(n for names in replicas for n, tells in names.items() if tells)
    return told.intersection(*replicas)
