"""Whether a loss that has taken another form adds up over micro-batches and replicas.

A step may compare the loss with a number, or leave a term out that no sample of its batch has. Its
micro-batches then do different things, and one process does one of them for all samples. A look at
the samples of one micro-batch cannot show that, as all of them may take the same branch. So the
step runs on some samples of each micro-batch of each replica, joined, and on those of each alone.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import BatchDims, take_samples
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.modes import WithoutDropout
from lightning_par.strategies.data.joined_batch import CannotJoinError, join_batches
from lightning_par.strategies.start.loss_rule import errors_of
from lightning_par.strategies.start.uncut_batch import RunParts
from lightning_par.strategies.step.batch_weights import LossRule

__all__ = ["check_joined_samples"]

_PARTS = 8
"""Micro-batches at most."""


def check_joined_samples(
    module: pl.LightningModule,
    mesh: ParallelMesh,
    rule: LossRule,
    parts: Sequence[tuple[Any, int]],
    dims: BatchDims,
    run: RunParts,
    tolerance: float,
) -> None:
    """Refuse a step whose loss of all samples is not made of the losses of its parts.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        rule: That of its loss.
        parts: The micro-batches of this replica, with their numbers of samples.
        dims: Which entries have a batch dim.
        run: Runs the step on some samples.
        tolerance: Relative difference of losses that is rounding.

    Raises:
        ConfigurationError: On every rank.

    **Communicates**: the samples, over the replicas; then what the step does.
    """
    own: list[list[Any]] | None = None
    if dims.size is not None and not dims.unsure and not any(dims.dims.values()):
        own = [
            [
                map_tensors(take_samples(part, dims, [row]), Tensor.cpu)
                for row in range(min(size, 2))
            ]
            for part, size in parts
        ]
    held = [own] * mesh.sizes.data
    if len(held) > 1:
        dist.all_gather_object(held, own, group=mesh.data_group)
    every = [samples for replica in held for samples in replica or ()][:_PARTS]
    if None in held or len(every) < 2:
        return
    try:
        # In the order of the parts, as a step may draw random numbers for the samples.
        joined = [(join_batches(s), len(s)) for s in ([x for p in every for x in p], *every)]
    except CannotJoinError:
        return
    joined = [(map_tensors(part, lambda t: t.to(module.device)), size) for part, size in joined]
    try:
        with WithoutDropout():
            seen, is_random = run(joined, made=True, sharpens=False)
    except ConfigurationError:  # the step does not take them, on any rank
        return
    errors = errors_of([rule], seen, joined[1:], tolerance)
    if is_random or errors.get(rule.name, 0.0) <= tolerance:
        return
    raise ConfigurationError(
        "LP309",
        f"{type(module).__name__}.training_step: in this batch the loss has another formula than "
        "in the first one, and the loss of samples of several micro-batches or replicas does not "
        "follow from the losses of these. The step decides what it computes by the loss itself or "
        "by samples of the batch, as in `if loss > limit` or `if mask.any()`; one process decides "
        "once for the whole batch. Decide for each sample, as in torch.where on the losses of the "
        "samples; or use num_microbatches=1 and data_parallel_size=1. No weight was changed in "
        "this step.",
    )
