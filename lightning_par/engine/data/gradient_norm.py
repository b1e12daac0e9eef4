"""Norm and clipping of the gradient of the whole model, whatever its sharding."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_par.dtensor import local_part
from lightning_par.engine.annotations import Float
from lightning_par.upstream.aten import foreach_norm

__all__ = ["clip_by_norm", "clip_by_value", "is_counted_here", "local_gradients", "total_norm"]


@torch.no_grad()
def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients as local plain tensors, which share their memory."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def is_counted_here(grad: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same shard of a gradient."""
    if not isinstance(grad, DTensor):
        return True
    place = grad.device_mesh.get_coordinate()
    assert place is not None
    pairs = zip(grad.placements, place, strict=True)
    return all(at == 0 for placement, at in pairs if isinstance(placement, Replicate))


@torch.no_grad()
def total_norm(
    parameters: Sequence[nn.Parameter],
    *,
    device: torch.device,
    elsewhere: Collection[int] = (),
    loss: Tensor | None = None,
    offloaded_norms: Sequence[tuple[Tensor, float]] = (),
) -> Float[Tensor, ""]:
    """Return the 2-norm of the gradient of the whole model, the same on every rank.

    It is NaN or infinite if anything is on any rank: a gradient, a copy that is not counted, or
    the loss.

    Args:
        parameters: The local parameters; every rank of the world has to call.
        device: Where the result is to be.
        elsewhere: Ids of parameters that another rank counts.
        loss: The loss of this rank; it only matters if it is not finite.
        offloaded_norms: Norms of gradients on the host, each with weight 1, or 0 for a copy.

    **Communicates**: one all-reduce of one number over all ranks.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    grads = [local_part(grad) for _, grad in held]
    poison = None if loss is None else loss * 0  # NaN if the loss is not finite
    if dist.get_world_size() == 1 and not offloaded_norms:
        norm = torch.nn.utils.get_total_norm(grads)
        return norm if poison is None else norm + poison.to(norm)
    double = any(g.dtype is torch.float64 for g in grads)
    dtype = torch.float64 if double else torch.float32
    norms: Any = foreach_norm(grads, 2, dtype=dtype) if grads else []
    square = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        # A copy weighs 0, which is NaN if the copy is not finite.
        weights = [float(id(p) not in elsewhere and is_counted_here(g)) for p, g in held]
        squares = torch.stack([n.to(device) for n in norms]).double().square()
        square += (squares * squares.new_tensor(weights)).sum()
    for known, weight in offloaded_norms:
        square += known.to(square).square() * weight
    if poison is not None:
        square += poison.to(square)
    dist.all_reduce(square)
    return square.sqrt()


@torch.no_grad()
def clip_by_norm(
    parameters: Sequence[nn.Parameter], norm: Float[Tensor, ""], max_norm: float
) -> None:
    """Scale the gradients so that their norm is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: The local parameters.
        norm: Norm of the gradient of the whole model, from `total_norm`.
        max_norm: Upper bound of that norm.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in local_gradients(parameters):
        grad.mul_(factor.to(grad.device, grad.dtype))


@torch.no_grad()
def clip_by_value(parameters: Iterable[nn.Parameter], value: float) -> None:
    """Clamp every entry of the gradients to [-value, value]."""
    for grad in local_gradients(parameters):
        grad.clamp_(-value, value)
