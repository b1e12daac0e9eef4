"""A global batch in the parts that the mesh computes apart, for one process.

Note [Local statistics]: a layer that normalizes over its batch, or a loss that balances the experts
of its batch, computes something else of the whole batch than of its parts, and
`BatchLayout(local_statistics=True)` says that this is meant. One process then runs the step once
for each part, and adds the losses up with the weights that they have on the mesh. A part is a
micro-batch of a replica or, where `ParallelPlan(replica_sums=...)` sums statistics over the
replicas, of all replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_par.strategies.data.joined_batch import CannotJoinError, join_batches
from lightning_par.strategies.step.pipelined_step import loss_of
from lightning_par.strategies.step.runner import StepRunner

__all__ = ["PartedBatch", "part_batch", "run_parts", "why_not_parted"]

_OF_ONE_PART = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


class PartedBatch(dict[str, Any]):
    """The parts of a global batch under "parts", their weights in its loss under "weights"; a
    mapping, so that Lightning moves it to a device as a batch.
    """


def why_not_parted(module: pl.LightningModule) -> str:
    """Return why one process cannot take a step part by part; empty: it can.

    Args:
        module: The user's LightningModule, on the mesh.
    """
    strategy: Any = module.trainer.strategy
    statistics = "BatchLayout(local_statistics=True) allows statistics over a part"
    if strategy.mesh.sizes.context > 1:
        return f"{statistics} of a sequence."
    if not module.automatic_optimization:
        return f"{statistics} of a batch, and the step runs its backwards itself."
    return ""


def part_batch(replicas: Sequence[Any], steps: StepRunner, *, sums: bool) -> PartedBatch:
    """Return the micro-batches of all replicas, with their weights.

    Args:
        replicas: The batch of each replica.
        steps: Cuts a batch as in training, and knows what weighs in the loss.
        sums: Whether statistics are summed over the replicas.

    Raises:
        CannotJoinError: Micro-batches of replicas cannot be joined, or not for all layers.
    """
    cut = [list(zip(*steps.cut(batch), strict=True)) for batch in replicas]
    if sums:
        if any(isinstance(module, _OF_ONE_PART) for module in steps.module.modules()):
            raise CannotJoinError(
                "SyncBatchNorm uses statistics of all replicas, but BatchNorm those of one replica"
            )
        each = (zip(*of_one, strict=True) for of_one in zip(*cut, strict=True))
        cut = [[(join_batches(parts), sum(sizes)) for parts, sizes in each]]
    held = [pair for of_replica in cut for pair in of_replica]
    rule = steps.weigher.rule
    counts = [float(rule.weigh(part, samples)) for part, samples in held]
    total = 1.0 if rule.is_sum else sum(counts)
    weights = [1.0 if rule.is_sum else count / total for count in counts]
    return PartedBatch(parts=[part for part, _ in held], weights=weights)


def run_parts(step: Callable[..., Any], batch: PartedBatch, *rest: Any) -> Any:
    """Run a training step for each part that weighs, and return the loss of the global batch.

    Args:
        step: The user's `training_step`.
        batch: The parts.
        rest: What else the step takes.
    """
    pairs = zip(batch["parts"], batch["weights"], strict=True)
    losses = [weight * loss_of(step(part, *rest)) for part, weight in pairs if weight]
    return sum(losses[1:], losses[0])
