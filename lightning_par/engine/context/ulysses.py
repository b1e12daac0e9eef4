"""Exchange of tokens for heads: the inner half of DeepSpeed-Ulysses.

Shapes: B batch, N heads, t tokens of one rank, u ranks, H head dim.

**Source**: Jacobs et al. 2309.14509 (DeepSpeed-Ulysses), section 3.1; Fang and Zhao 2405.07719 for
a ring around it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.annotations import Float
from lightning_par.engine.collectives import apply_function

__all__ = ["gather_tokens", "scatter_tokens"]


def _exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Cut dim `split` among the ranks, and join dim `join` of what they send."""
    ranks = group.size()
    # [u, ...] in contiguous pieces, as all_to_all_single sends rows.
    parts = torch.stack([c.contiguous() for c in x.chunk(ranks, split)])
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat(arrived.unbind(), join)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (split, join), group
        return _exchange(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, join = ctx.dims
        # The inverse exchange; through `apply_function`, so that it can be differentiated again.
        return apply_function(_Exchange, grad, join, split, ctx.group), None, None, None


def gather_tokens(
    x: Float[Tensor, "B N t H"], group: dist.ProcessGroup
) -> Float[Tensor, "B n T H"]:
    """Return N/u heads of all the group's tokens.

    Args:
        x: [B, N, t, H]; N is a multiple of u.
        group: The u ranks, in the order of their tokens.

    Returns:
        [B, N/u, u t, H].

    **Communicates**: one all-to-all of `x`, and one of its gradient in the backward.
    """
    return apply_function(_Exchange, x, 1, 2, group)


def scatter_tokens(
    x: Float[Tensor, "B n T H"], group: dist.ProcessGroup
) -> Float[Tensor, "B N t H"]:
    """Return all heads of this rank's tokens; undoes `gather_tokens`.

    **Communicates**: one all-to-all of `x`, and one of its gradient in the backward.
    """
    return apply_function(_Exchange, x, 2, 1, group)
