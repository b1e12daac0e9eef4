"""What the numbers that a step logs tell of how they are means over a batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.strategies.start.loss_rule import choose_rule, errors_of
from lightning_par.strategies.start.seen_rules import rules_seen
from lightning_par.strategies.step.batch_weights import LossRule, MEAN_OVER_SAMPLES
from lightning_par.strategies.step.runner import StepRunner
from lightning_par.strategies.step.step_report import StepReport
from lightning_par.strategies.step.step_traces import LogCall, reduction_name

__all__ = ["is_joined", "learn_rule", "sized_by_samples", "sized_on_all"]


def is_joined(call: LogCall) -> bool:
    """Return whether a number is joined over the replicas: one that is logged with ``sync_dist``,
    or is in the result of a step, of which hooks get that of all replicas.
    """
    return bool(call.options.get("sync_dist")) or "()" in call.name


def sized_by_samples(
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


def sized_on_all(replicas: Sequence[Mapping[str, bool]]) -> frozenset[str]:
    """Return the names that `sized_by_samples` has found on all replicas, and told on one."""
    told = frozenset(n for names in replicas for n, tells in names.items() if tells)
    return told.intersection(*replicas)


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
