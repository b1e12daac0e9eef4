"""Reduction of gradients of parameters that several ranks hold: sums and means over a group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.data.gradient_norm import local_gradients

__all__ = [
    "ReplicatedGradients",
    "SharedGradients",
    "fill_buckets",
    "sum_together",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGradients:
    """Parameters that several ranks hold, each with a partial gradient; the gradients are summed.

    Attributes:
        parameters: The parameters, in the same order on every rank of the group.
        group: The ranks that hold the copies.
    """

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the group; a missing one counts as 0.

        **Communicates**: one all-reduce of all these gradients for each dtype.
        """
        for parameter in self.parameters:
            # All ranks have to send the same bytes, also for a parameter that a rank did not use.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in local_gradients(self.parameters):
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            for grad, total in zip(grads, sum_together(grads, self.group), strict=True):
                grad.copy_(total)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicatedGradients:
    """Parameters that several ranks hold, each with the gradient of other tokens of the same
    samples; the gradients are averaged.

    Attributes:
        parameters: The parameters, in the same order on every rank of the group.
        group: The ranks that hold the copies.
    """

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients over the group.

        A gradient that no rank has stays None, so that the optimizer leaves its parameter alone;
        one that only some ranks have counts as 0 on the others.

        **Communicates**: one all-reduce of a number for each parameter, then the gradients in
        messages of about 32 MiB.
        """
        wanted = [p for p in self.parameters if p.requires_grad]
        if not wanted:
            return
        # Which gradients exist may differ by rank, so that all ranks agree before the buckets.
        device = local_part(wanted[0]).device
        held = torch.tensor([float(p.grad is not None) for p in wanted], device=device)
        dist.all_reduce(held, group=self.group)
        used = [p for p, count in zip(wanted, held.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in fill_buckets(used):
            grads = local_gradients(bucket)
            for grad, total in zip(grads, sum_together(grads, self.group), strict=True):
                torch.div(total, self.group.size(), out=grad)


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the sums of tensors of one dtype over a group, in new memory.

    **Communicates**: one all-reduce of all of them; none if there are none.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    return [total.view_as(tensor) for total, tensor in zip(sums, tensors, strict=True)]


_BUCKET = 2**25  # bytes


def fill_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of one dtype, each of 32 MiB on this rank or little more."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        bucket, size = filling.pop(parameter.dtype, ([], 0))
        bucket.append(parameter)
        size += local_part(parameter).numel() * parameter.element_size()
        if size >= _BUCKET:
            full.append(bucket)
        else:
            filling[parameter.dtype] = bucket, size
    return full + [bucket for bucket, _ in filling.values()]
