"""Replicated parameters: those that several ranks hold, and how their gradients are reduced."""

from collections.abc import Sequence

import torch
from torch import nn

from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.experts.apply import ExpertParallel
from lightning_par.engine.tensor.apply import TensorParallel
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan

__all__ = ["find_copies"]


def find_copies(
    module: nn.Module,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    bounds: Sequence[tuple[int, int]],
    rank_of_stage: Sequence[int],
    tensor: TensorParallel | None,
    experts: ExpertParallel | None = None,
    replicas: Sequence[nn.Parameter] = (),
    *,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[SharedGradients | ReplicatedGradients, ...], frozenset[int]]:
    """Find the parameters that several pipeline ranks hold, those with partial gradients on the
    ``tp`` axis, and those that the ``cp`` axis or replicas hold alike; every rank must call this.

    Args:
        module: The module, with the parameters of this rank.
        resolved: The resolved plan.
        mesh: The mesh.
        bounds: First and one-past-last block of every pipeline stage.
        rank_of_stage: The pipeline rank that holds each stage.
        tensor: Tensor parallelism of the module, if any.
        experts: Experts that are sharded, which other context ranks do not hold.
        replicas: Parameters that every replica holds whole.
        dtype: In which their gradients are added over the replicas; None: their own.

    Returns:
        The reductions after the backward, in order; and the ids of the parameters that another
        rank counts in the norm.

    **Communicates**: makes process groups over all ranks.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    shared: list[SharedGradients | ReplicatedGradients] = []
    elsewhere: set[int] = set()
    if replicas:
        shared.append(_average_of_replicas(module, mesh, replicas, dtype))
        # Norms count a parameter once: on the first replica.
        elsewhere |= {id(p) for p in replicas} if mesh.data_rank else set()
    # Each tensor rank has the gradient of its own heads, features or tokens: the sum is whole.
    if tensor is not None:
        partial = [p for n, p in named.items() if n in tensor.partial]
        unique = tuple({id(p): p for p in partial}.values())
        if unique:
            shared.append(SharedGradients(parameters=unique, group=mesh.group("tp")))
    for ranks, names in _by_owners(resolved, bounds, rank_of_stage).items():
        # Every rank makes every group, also those that it is not in: `new_group` is a collective
        # of all ranks.
        group = mesh.subgroup(("pp",), [sorted(ranks)])
        if mesh.place["pp"] not in ranks:
            continue
        assert group is not None
        held = {resolved.canonical[n]: p for n, p in named.items()}
        parameters = tuple(held[name] for name in names)
        shared.append(SharedGradients(parameters=parameters, group=group))
        if mesh.place["pp"] != min(ranks):
            elsewhere |= {id(p) for p in parameters}
    # A mean, not a sum: the weights of the loss are scaled by the number of context ranks.
    if mesh.sizes.context > 1:
        apart = set() if experts is None else set(map(id, experts.held()))
        everything = tuple(p for p in module.parameters() if id(p) not in apart)
        shared.append(ReplicatedGradients(parameters=everything, group=mesh.group("cp")))
        if mesh.place["cp"]:
            elsewhere |= {id(p) for p in everything}
    if experts is not None and mesh.sizes.data == 1:  # else FSDP reduces them
        group, held_here = experts.mesh.get_group("expert_replicate"), tuple(experts.held())
        shared.append(ReplicatedGradients(parameters=held_here, group=group))
        if group.rank():
            elsewhere |= {id(p) for p in held_here}
    return tuple(shared), frozenset(elsewhere)


def _average_of_replicas(
    module: nn.Module,
    mesh: ParallelMesh,
    replicas: Sequence[nn.Parameter],
    dtype: torch.dtype | None,
) -> ReplicatedGradients:
    # Other axes, and FSDP, change or need gradients after the backward.
    are_all = mesh.sizes.data == mesh.sizes.world_size and {*module.parameters()} == {*replicas}
    if not are_all:
        return ReplicatedGradients(parameters=replicas, group=mesh.data_group, dtype=dtype)
    # A group of its own: what a user sends in a backward may be before or after a bucket. That of
    # an axis is the world, which users mean where they name no group, if all ranks are on the axis.
    keep = [range(mesh.sizes.data_replicate), range(mesh.sizes.data_shard)]
    group = mesh.subgroup(("dp_replicate", "dp_shard"), keep)
    assert group is not None
    mesh.links["dp gradients"] = group
    return ReplicatedGradients(parameters=replicas, group=group, dtype=dtype, early=True)


def _by_owners(
    resolved: ResolvedPlan, bounds: Sequence[tuple[int, int]], rank_of_stage: Sequence[int]
) -> dict[frozenset[int], list[str]]:
    """Return pipeline ranks -> canonical names of the parameters that exactly they all hold."""
    holders: dict[str, frozenset[int]] = {}
    for name, canonical in resolved.canonical.items():
        before = holders.get(canonical, frozenset())
        held = {rank_of_stage[s] for s in resolved.stages_of(name, bounds)}
        holders[canonical] = before | held
    found: dict[frozenset[int], list[str]] = {}
    # In the order of the plan, which is the same on all ranks: the groups are made in it.
    for name, ranks in holders.items():
        if len(ranks) > 1:
            found.setdefault(ranks, []).append(name)
    return found
