"""Whole tensors, losses and batches of the mesh, on rank 0."""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import full_tensors
from lightning_par.engine.tensor_tree import to_cpu
from lightning_par.mesh import ParallelMesh

__all__ = ["gather_batches", "gather_state", "gather_tensors", "mean_over"]


@torch.no_grad()
def gather_tensors(
    named: Iterable[tuple[str, Tensor | None]], canonical: Mapping[str, str], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Return the tensors of all stages, whole and copied to the CPU, on rank 0; elsewhere nothing.

    Args:
        named: FQN -> tensor of this rank, in the same order on all ranks of a stage.
        canonical: FQN -> the name under which one process lists it.
        mesh: Mesh over which they are sharded.

    **Communicates**: all-gathers of the sharded tensors, then one gather over the pipeline stages.
    """
    keeps = all(at == 0 for axis, at in mesh.place.items() if axis != "pp")
    held = {name: tensor for name, tensor in named if tensor is not None}
    found: dict[str, Tensor] = {}
    for name, whole in zip(held, full_tensors(held.values()), strict=True):
        if keeps:
            found[canonical.get(name, name)] = whole.to("cpu", copy=True)
    if not keeps:
        return {}
    stages = _gather(found, mesh.sizes.pipeline, mesh, "pp")
    merged: dict[str, Tensor] = {}
    for stage in stages:
        merged = {**stage, **merged}
    return merged


def gather_state(
    module: nn.Module, canonical: Mapping[str, str], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Return all parameters and buffers likewise; gathered weights have to be released before.

    Args:
        module: The module on the mesh.
        canonical: See `gather_tensors`.
        mesh: Mesh of this run.

    **Communicates**: as `gather_tensors`.
    """
    # A buffer under the name of a parameter stands for that of another stage.
    buffers = [(n, b) for n, b in module.named_buffers() if n not in canonical]
    return gather_tensors((*module.named_parameters(), *buffers), canonical, mesh)


def gather_batches(batch: Any, mesh: ParallelMesh) -> list[Any] | None:
    """Return the batches of all replicas that have one on rank 0, copied to the CPU; elsewhere an
    empty list; None if a batch cannot be sent.

    Args:
        batch: That of this replica; None: it has none.
        mesh: Mesh of this run.

    **Communicates**: the batches, over the replicas.
    """
    if any(at for axis, at in mesh.place.items() if not axis.startswith("dp")):
        return []
    try:
        packed = pickle.dumps(to_cpu(batch))
    except Exception:
        packed = b""
    parts: list[Any] | None = [b""] * mesh.sizes.data if mesh.rank == 0 else None
    if mesh.sizes.data > 1:
        dist.gather_object(packed, parts, dst=0, group=mesh.data_group)
    else:
        parts = [packed]
    if mesh.rank:
        return []
    if not all(parts or ()):
        return None
    return [batch for batch in map(pickle.loads, parts or ()) if batch is not None]


def mean_over(value: Tensor, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the mean of a number over a group.

    **Communicates**: one all-reduce of one number.
    """
    total = value.detach().to(device, torch.float64).reshape(())
    if group.size() > 1:
        total = total.clone()
        dist.all_reduce(total, group=group)
    return float(total) / group.size()


def _gather(value: Any, size: int, mesh: ParallelMesh, axis: str) -> list[Any]:
    """Return the values along an axis on rank 0, of which this rank shares the other places."""
    if size == 1:
        return [value]
    parts: list[Any] | None = [None] * size if mesh.rank == 0 else None
    dist.gather_object(value, parts, dst=0, group=mesh.group(axis))
    return parts or []
