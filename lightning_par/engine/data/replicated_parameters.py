"""Parameters of which several ranks hold a copy, and what happens to their gradients."""

from collections.abc import Sequence

from torch import nn

from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.experts.apply import ExpertParallel
from lightning_par.engine.tensor.apply import TensorParallel
from lightning_par.mesh import ParallelMesh
from lightning_par.resolved_plan import ResolvedPlan

__all__ = ["find_copies"]


def find_copies(
    module: nn.Module,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    bounds: Sequence[tuple[int, int]],
    rank_of_stage: Sequence[int],
    tensor: TensorParallel | None,
    experts: ExpertParallel | None = None,
) -> tuple[tuple[SharedGradients | ReplicatedGradients, ...], frozenset[int]]:
    """Find the parameters that several pipeline ranks hold, those that tensor parallelism computes
    in parts, and those that other context ranks use on other tokens; every rank must call this.

    Args:
        module: It holds this rank's part.
        resolved: The resolved plan.
        mesh: Where it is.
        bounds: First and one-past-last block of every pipeline stage.
        rank_of_stage: The pipeline rank that holds each stage.
        tensor: What tensor parallelism did, if anything.
        experts: Those that are divided, which other context ranks do not hold.

    Returns:
        What is to be reduced after the backward, in order; and the ids of the parameters that
        another rank counts in the norm.

    **Communicates**: makes process groups over all ranks.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    shared: list[SharedGradients | ReplicatedGradients] = []
    elsewhere: set[int] = set()
    if tensor is not None:
        partial = [p for n, p in named.items() if n in tensor.partial]
        unique = tuple({id(p): p for p in partial}.values())
        if unique:
            shared.append(SharedGradients(parameters=unique, group=mesh.group("tp")))
    for ranks, names in _by_owners(resolved, bounds, rank_of_stage).items():
        group = mesh.subgroup(("pp",), [sorted(ranks)])
        if mesh.place["pp"] not in ranks:
            continue
        assert group is not None
        held = {resolved.canonical[n]: p for n, p in named.items()}
        parameters = tuple(held[name] for name in names)
        shared.append(SharedGradients(parameters=parameters, group=group))
        if mesh.place["pp"] != min(ranks):
            elsewhere |= {id(p) for p in parameters}
    if mesh.sizes.context > 1:
        apart = set() if experts is None else set(map(id, experts.held()))
        everything = tuple(p for p in module.parameters() if id(p) not in apart)
        shared.append(ReplicatedGradients(parameters=everything, group=mesh.group("cp")))
        if mesh.place["cp"]:
            elsewhere |= {id(p) for p in everything}
    if experts is not None and mesh.sizes.data == 1:  # else FSDP reduces them
        group, divided = experts.mesh.get_group("expert_replicate"), tuple(experts.held())
        shared.append(ReplicatedGradients(parameters=divided, group=group))
        if group.rank():
            elsewhere |= {id(p) for p in divided}
    return tuple(shared), frozenset(elsewhere)


def _by_owners(
    resolved: ResolvedPlan, bounds: Sequence[tuple[int, int]], rank_of_stage: Sequence[int]
) -> dict[frozenset[int], list[str]]:
    """Return the canonical names of parameters that several ranks of the pipeline hold, by the
    ranks that do.
    """
    holders: dict[str, frozenset[int]] = {}
    for name, canonical in resolved.canonical.items():
        before = holders.get(canonical, frozenset())
        held = {rank_of_stage[s] for s in resolved.stages_of(name, bounds)}
        holders[canonical] = before | held
    found: dict[frozenset[int], list[str]] = {}
    for name, ranks in holders.items():
        if len(ranks) > 1:
            found.setdefault(ranks, []).append(name)
    return found
