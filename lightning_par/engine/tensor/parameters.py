"""Parameters under tensor parallelism: where each is sharded, and how a rank's shard is made."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_par.engine.collectives import split_sizes
from lightning_par.errors import PlanError
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.upstream.dispatch import any_true_operator

__all__ = ["shard_parameter", "tensor_placements"]


@register_sharding(any_true_operator)  # type: ignore[untyped-decorator]
def _any_true(flags: Any) -> list[Any]:
    """Let autograd's anomaly detection look for NaN in a DTensor; torch has no rule for it."""
    return [([Replicate()], [Replicate()])]


def tensor_placements(model: nn.Module, resolved: ResolvedPlan) -> dict[str, Placement]:
    """Return the placement of every parameter on the ``tp`` axis, ties under each of their names.

    Args:
        model: Parameters may be on meta; those that are not here are left out.
        resolved: The resolved plan.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    # By identity, so that a tie is placed once, whichever of its names has a style.
    sharded: dict[int, Placement] = {}
    for fqn, parameter in named.items():
        owner, _, name = fqn.rpartition(".")
        dim = TENSOR_STYLES[resolved.styles.get(owner, "replicated")].sharded_dim(name)
        # A tie may have names without a style, or whole ones: all mean the sharded parameter.
        if dim is not None:
            sharded[id(parameter)] = Shard(dim)
    return {fqn: sharded.get(id(p), Replicate()) for fqn, p in named.items()}


def shard_parameter(
    full: Tensor, placements: Sequence[Placement], mesh: DeviceMesh, *, requires_grad: bool
) -> nn.Parameter:
    """Shard a parameter that every rank has whole.

    Args:
        full: The whole value, the same on every rank.
        placements: For every axis of `mesh`, Shard of a dim or Replicate; an uneven shard is
            cut as `split_sizes` says.
        mesh: The ``tp`` axis, or those of the experts.
        requires_grad: Whether the parameter is trained.

    Returns:
        A DTensor parameter with this rank's part.

    Raises:
        PlanError: A placement is neither Shard nor Replicate.
    """
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            # Of what an axis before has left: experts may be divided over two of them.
            sizes = split_sizes(local.shape[placement.dim], mesh.size(axis))
            local = local.split(sizes, placement.dim)[mesh.get_local_rank(axis)]
        elif not isinstance(placement, Replicate):
            raise PlanError(
                "LP207",
                f"a parameter cannot be sharded as {placement}: a shard has to be one contiguous "
                "block of one dim. Use Shard(dim) or Replicate().",
            )
    if local is not full:
        # A view would keep the whole tensor in memory.
        local = local.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        # Shape and stride are given, as uneven shards do not tell them.
        local,
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return nn.Parameter(sharded, requires_grad=requires_grad)
