"""Batches of steps that take those of several loaders at once.

The batch of each loader is divided among the replicas by itself. Where one cannot be divided
equally, as at the end of a loader, no number says what the part of a replica weighs in the loss of
the step: then the first replica takes what one process would, and the others count nowhere.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.data.joined_batch import CannotJoinError, join_batches, samples_of
from lightning_par.strategies.data.replica_batches import Share

__all__ = ["share_joint_batch"]


def share_joint_batch(
    batch: Any, spec: Any, shares: Sequence[Share | None], mesh: ParallelMesh
) -> tuple[Any, Share]:
    """Return the batch that the step of this replica gets, and what it is of the global one.

    Args:
        batch: A nest of batches, one of each loader; None of a loader that is at its end.
        spec: Spec of that nest.
        shares: What they are of those of all replicas; None: nobody knows.
        mesh: Mesh of this run.

    Raises:
        ConfigurationError: A batch cannot be divided equally, nor joined.

    **Communicates**: where a batch cannot be divided equally, the batches, over the replicas.
    """
    replicas = mesh.sizes.data
    # The same on all replicas, since it is computed of global numbers: no rank waits alone below.
    if all(share is None or share.total == share.smallest * replicas for share in shares):
        totals = {share.total for share in shares if share is not None}
        if replicas == 1:
            totals = {samples_of(part) for part in _parts(batch, spec) if part is not None}
        uneven = Share(smallest=1, is_even=False, is_whole=replicas == 1)
        return batch, uneven if len(totals) > 1 else Share()
    parts: list[Any] = [None] * replicas
    fills = [share is not None and share.fills for share in shares]
    # Over the replicas: ranks of one have the same batch.
    dist.all_gather_object(parts, (batch, fills), group=mesh.data_group)
    try:
        joined = _joined(parts, spec)
    except (CannotJoinError, ValueError) as error:
        raise ConfigurationError(
            "LP326",
            f"the batches of the replicas cannot be joined: {error}. Why they are joined: a step "
            f"gets a batch from each of {len(shares)} data loaders, and the number of samples in "
            f"one of these batches is not divisible by {replicas} replicas, so the first replica "
            "has to compute the step on the samples of all replicas. Pass drop_last=True to the "
            "loaders, or pad all samples to one length.",
        ) from error
    is_first = mesh.data_rank == 0
    share = Share(smallest=0, fills=not is_first, is_even=False, is_whole=True)
    return joined if is_first else batch, share


def _joined(parts: Sequence[tuple[Any, list[bool]]], spec: Any) -> Any:
    """Return the batches of every loader, without samples that are there twice."""
    columns = zip(*(spec.flatten_up_to(batch) for batch, _ in parts), strict=True)
    joined = []
    for number, column in enumerate(columns):
        # Without those that only repeat a sample.
        own = [part for part, (_, fills) in zip(column, parts, strict=True) if not fills[number]]
        joined.append(join_batches(own))
    return spec.unflatten(joined)


def _parts(batch: Any, spec: Any) -> list[Any]:
    try:
        parts: list[Any] = spec.flatten_up_to(batch)
    except ValueError:  # a hook has made another nest
        return []
    return parts
