"""Context parallelism of a model: intercept the attention of its blocks, pass positions.

Shapes: t tokens of one rank.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_par.engine.context.attention import intercept_attention
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.context.ring_p2p import RingChannel
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.pipeline.stage import matching_modules, StageStub
from lightning_par.errors import nearest, PlanError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import match_pattern, ParallelPlan
from lightning_par.plan.resolved_plan import ResolvedPlan

__all__ = ["apply_context_parallel", "build_axis", "check_context"]


def check_context(model: nn.Module, plan: ParallelPlan, degree: int) -> None:
    """Raise if context parallelism would change the result.

    Args:
        model: The user's model; its parameters may be on the meta device.
        plan: The plan of the model; FQNs as seen from `model`.
        degree: Size of the context axis.

    Raises:
        PlanError: The plan lacks something; the message names everything that it lacks.
    """
    if degree == 1:
        return
    asked, name, batch = f"context_parallel_size={degree}", type(model).__name__, plan.batch
    problems = []
    if plan.blocks is None:
        problems.append(
            f"{asked}: the plan of {name} does not say which modules are its blocks, so its "
            'attention cannot be divided over the ranks. Return ParallelPlan(blocks="...") from '
            "parallel_plan() of the model, with the name of its list of blocks."
        )
    if plan.positions is None:
        problems.append(
            f"{asked}: the plan of {name} does not say how the model gets the positions of its "
            "tokens, so every rank would count its tokens from 0. Return "
            "ParallelPlan(positions={'': 'position_ids'}) if its forward takes position_ids, or "
            "ParallelPlan(positions={}) if the model uses no positions or reads them from the "
            "batch."
        )
    # The loss of a rank is weighted by the labels that it holds; other means do not divide by
    # tokens.
    if batch.labels is None or batch.labels not in batch.sequence_dims:
        says = "does not say which batch entry holds the labels"
        if batch.labels is not None:
            says = f"gives no sequence dim for the labels {batch.labels!r}"
        problems.append(
            f"{asked}: the plan {says}, so the losses of the ranks cannot be weighted by their "
            "numbers of labels. Declare the labels in BatchLayout(labels=..., sequence_dims=...), "
            "or use context_parallel_size=1."
        )
    if "context" in plan.refusals:
        raise PlanError("LP211", f"{asked}: {plan.refusals['context']}")
    if batch.label_shift and batch.shifted is None:
        problems.append(
            f"{asked}: label_shift={batch.label_shift}, so the model itself shifts the labels by "
            "one token, but the next token may be on another rank. Shift the labels in the data "
            "set, and set label_shift=0."
        )
    raise_problems(PlanError, "LP205", problems)
    # After the problems of the plan: it names modules, which may not be there.
    _check_positions(model, plan.positions or {})


def _check_positions(model: nn.Module, patterns: Mapping[str, str]) -> None:
    """Raise if a module that a plan names for positions is not there, or takes none."""
    modules, problems = dict(model.named_modules()), list[str]()
    for pattern, keyword in patterns.items():
        hits = [name for name in modules if name == pattern or match_pattern(pattern, name)]
        if not hits:
            hint = nearest(pattern, filter(None, modules))
            problems.append(f"ParallelPlan(positions=...): {pattern!r} matches no module{hint}")
        for name in hits:
            takes = list(inspect.signature(modules[name].forward).parameters)
            if keyword not in takes:
                problems.append(
                    f"ParallelPlan(positions=...): the forward of {name or type(model).__name__} "
                    f"has no argument {keyword!r}. Its arguments are {', '.join(takes)}."
                )
    raise_problems(PlanError, "LP203", problems)


def build_axis(mesh: ParallelMesh, options: ContextOptions, *, divisor: int = 1) -> SequenceShard:
    """Make the process groups of the context axis; every rank must call this.

    Args:
        mesh: The mesh, with its ``cp`` axis.
        options: Options of context parallelism.
        divisor: The number of tokens of a rank is padded to a multiple of it.

    Raises:
        ConfigurationError: The options do not fit the degree of the axis.

    **Communicates**: makes process groups over all ranks, if some ranks exchange heads and others
    form rings.
    """
    degree = mesh.sizes.context
    ulysses = options.ulysses(degree)
    rings = degree // ulysses
    heads, ring = mesh.group("cp"), mesh.group("cp")
    if ulysses > 1 and rings > 1:
        # Neighbors exchange heads, as all-to-all moves most: they are on one host, if any ranks
        # are.
        heads = _own_group(mesh, [range(m * ulysses, (m + 1) * ulysses) for m in range(rings)])
        ring = _own_group(mesh, [range(place, degree, ulysses) for place in range(ulysses)])
    if rings > 1 and mesh.device_type == "cuda":
        # NCCL wants all members in a group's first call; a message has only two.
        dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=ring)
    return SequenceShard(
        options=options,
        group=mesh.group("cp"),
        heads=heads if ulysses > 1 else None,
        channel=RingChannel(ring) if rings > 1 else None,
        divisor=divisor,
    )


def _own_group(mesh: ParallelMesh, places: list[range]) -> dist.ProcessGroup:
    """Make a group of each of these coordinates; return the one of this rank."""
    made = [mesh.subgroup(("cp",), [place]) for place in places]
    (own,) = [group for group in made if group is not None]
    return own


def apply_context_parallel(model: nn.Module, resolved: ResolvedPlan, axis: SequenceShard) -> None:
    """Send the attention of the plan's blocks over the axis, and pass the model its positions.

    Args:
        model: Changed in place.
        resolved: The resolved plan.
        axis: This rank's shard of the sequences.
    """
    found = map(model.get_submodule, resolved.block_names)
    blocks = [block for block in found if not isinstance(block, StageStub)]
    summed = matching_modules(model, resolved.plan.replica_sums)
    # The parent of what is summed computes the sum: its operations along T are allowed.
    added = sorted({name.rpartition(".")[0] for name in summed})
    intercept_attention(blocks, axis, map(model.get_submodule, added))
    for pattern, keyword in (resolved.plan.positions or {}).items():
        for module in matching_modules(model, [pattern]).values():
            _give_positions(module, keyword, axis)


def _give_positions(module: nn.Module, keyword: str, axis: SequenceShard) -> None:
    """Pass the positions [1, t] to a module whenever its caller leaves them out."""
    # Taken once: it costs more than a small forward.
    signature = inspect.signature(module.forward)

    # Arguments by position, too: the caller may pass positions either way.
    def fill(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if axis.positions is None:
            return None
        axis.fills += 1
        given = signature.bind_partial(*args, **kwargs).arguments
        if given.get(keyword) is not None:
            return None
        given[keyword] = axis.positions
        bound = signature.bind_partial()
        # In the order of the signature, so that positional-only arguments stay positional.
        bound.arguments.update({n: given[n] for n in signature.parameters if n in given})
        return bound.args, bound.kwargs

    module.register_forward_pre_hook(fill, with_kwargs=True)
