"""Whole tensors, losses and batches of the mesh, on rank 0."""

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.dtensor import full_tensors
from lightning_par.engine.tensor_tree import broadcast_object, to_cpu
from lightning_par.errors import CheckpointError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.batch_weights import weigh

__all__ = [
    "Form",
    "from_first",
    "gather_batches",
    "gather_buffers",
    "gather_forms",
    "gather_gradients",
    "gather_optimizers",
    "gather_parameters",
    "gather_state",
    "gather_tensors",
    "gather_trained",
    "global_loss",
]


class Form(NamedTuple):
    """What is known of a parameter without its value: shape of the whole, dtype, and whether it is
    trained.
    """

    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool


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


def gather_state(model: ParallelModel) -> dict[str, Tensor]:
    """Return all parameters and buffers, whole and copied to the CPU, on rank 0; elsewhere nothing.

    Lets go of gathered weights first.

    Args:
        model: The model on the mesh.

    **Communicates**: as `gather_tensors`.
    """
    model.sharding.release()
    return {**gather_parameters(model), **gather_buffers(model)}


def gather_buffers(model: ParallelModel) -> dict[str, Tensor]:
    """Return all buffers, whole and copied to the CPU, on rank 0; elsewhere nothing.

    Args:
        model: The model on the mesh; nothing is gathered.

    **Communicates**: as `gather_tensors`.
    """
    canonical = model.resolved.canonical
    # A buffer under the name of a parameter stands for that of another stage.
    buffers = ((n, b) for n, b in model.module.named_buffers() if n not in canonical)
    return gather_tensors(buffers, canonical, model.mesh)


def gather_forms(model: ParallelModel) -> dict[str, Form]:
    """Return the forms of all parameters on rank 0; elsewhere nothing.

    Args:
        model: The model on the mesh.

    **Communicates**: one gather over the pipeline stages.
    """
    canonical, mesh = model.resolved.canonical, model.mesh
    if any(at for axis, at in mesh.place.items() if axis != "pp"):
        return {}
    named = model.module.named_parameters()
    own = {canonical.get(n, n): Form(p.shape, p.dtype, p.requires_grad) for n, p in named}
    forms: dict[str, Form] = {}
    for stage in _gather(own, mesh.sizes.pipeline, mesh, "pp"):
        forms |= stage
    return forms


def gather_trained(model: ParallelModel) -> frozenset[str]:
    """Return the names of the parameters that are not frozen now, on rank 0; elsewhere none.

    Args:
        model: The model on the mesh.

    **Communicates**: as `gather_forms`.
    """
    return frozenset(name for name, form in gather_forms(model).items() if form.is_trained)


def gather_gradients(model: ParallelModel) -> dict[str, Tensor]:
    """Return all gradients, whole and copied to the CPU, on rank 0; elsewhere nothing.

    Args:
        model: The model on the mesh.

    **Communicates**: as `gather_tensors`.
    """
    named = ((n, p.grad) for n, p in model.module.named_parameters())
    return gather_tensors(named, model.resolved.canonical, model.mesh)


def gather_parameters(model: ParallelModel) -> dict[str, Tensor]:
    """Return all parameters, whole and copied to the CPU, on rank 0; elsewhere nothing.

    Args:
        model: The model on the mesh; nothing is gathered.

    **Communicates**: as `gather_tensors`.
    """
    named = model.module.named_parameters()
    return gather_tensors(named, model.resolved.canonical, model.mesh)


def gather_optimizers(
    model: ParallelModel, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]] | None:
    """Return the states of optimizers on rank 0, whole, as one process has them; elsewhere they are
    empty. None: they cannot be gathered, as those that the host updates, those of which nobody
    knows which part a rank holds, and those of other libraries than torch, whose optimizers may
    keep more than their states, such as counters.

    Args:
        model: The model on the mesh.
        optimizers: Those of this rank.

    **Communicates**: whether each rank can give them, then the states.
    """
    are_of_torch = all(type(each).__module__.split(".")[0] == "torch" for each in optimizers)
    if model.host is not None or not are_of_torch:
        return None
    local: list[dict[str, Any]] = []
    with suppress(CheckpointError):
        local += [model.states.local_optimizer(model.module, each) for each in optimizers]
    lacks = torch.tensor(float(len(local) < len(optimizers)), device=model.module.device)
    dist.all_reduce(lacks, dist.ReduceOp.MAX)
    if bool(lacks):
        return None
    # Copies: of what no rank divides the step writes to the same tensors.
    return [copy.deepcopy(model.states.gather_local_optimizer(state)) for state in local]


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


def from_first(value: Any) -> Any:
    """Return what rank 0 has, on every rank."""
    world = dist.group.WORLD
    assert world is not None
    return broadcast_object(value, 0, world)


def global_loss(model: ParallelModel, weighted: Tensor, device: torch.device) -> float:
    """Return the loss of the global batch.

    Args:
        model: The model on the mesh.
        weighted: Loss of this rank, weighted.
        device: That of this rank.

    **Communicates**: one all-reduce of one number.
    """
    mesh, pipeline = model.mesh, model.steps.pipeline
    if pipeline is None:
        return _mean_over(weighted, mesh.token_group, device)
    loss = weighted.detach().cpu().double()
    return _mean_over(weigh(loss, pipeline.last_weight.cpu()), mesh.data_group, device)


def _mean_over(value: Tensor, group: dist.ProcessGroup, device: torch.device) -> float:
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
