"""Token dispatch of expert parallelism: the all-to-all that brings rows to their experts and back.

Shapes: A rows (tokens times the experts of each) of this rank, M rows that arrive here, D model
dim, E experts, n ranks of the ``ep`` axis; a rank holds E/n experts.

Note [Overlapped exchange]: the all-to-all of the rows starts before, and is waited for after, the
work that `compute` is given to do beside it, such as shared experts.

**Source**: Lepikhin et al. 2006.16668 (GShard), section 3; Gale et al. 2211.15841 (no row dropped
or padded).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.collectives import apply_function
from lightning_par.upstream.distributed import functional_operators

__all__ = ["dispatch_tokens"]


_ops = functional_operators


_Beside = Callable[[], Tensor] | None


def dispatch_tokens(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Wrap `module.compute`, so that it gets the rows of all ranks for the local experts.

    Args:
        module: Changed in place; it has ``compute(rows, counts, beside)``.
        group: The ``ep`` axis.

    **Communicates**: E numbers, then A D values out and back over ``ep``, less those that stay;
    the values once more in the backward.
    """
    inner: Callable[..., tuple[Tensor, Any]] = module.compute  # type: ignore[assignment]

    def compute(x: Tensor, counts: Tensor, beside: _Beside = None) -> tuple[Tensor, Any]:
        # See Note [Overlapped exchange].
        routes = _find_routes(counts, group)
        pending = routes.start(x)
        other = None if beside is None else beside()
        rows = apply_function(_Exchange, x, [pending], routes, float(group.size()))
        rows = apply_function(_Permute, rows, routes.order, routes.back)
        answers, _ = inner(rows, routes.counts)
        answers = apply_function(_Permute, answers, routes.back, routes.order)
        home = routes.reverse()
        out = apply_function(_Exchange, answers, [home.start(answers)], home, 1.0 / group.size())
        return out, other

    module.compute = compute  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Routes:
    """The routes of the rows of one forward.

    Attributes:
        sent: [n], number of rows for every rank, in the order of the ranks.
        received: [n], number of rows from every rank.
        counts: [E/n], number of rows of every local expert.
        order: [M], int64: permutation that sorts the rows that arrived by expert.
        back: [M], int64: its inverse.
        group: The ``ep`` axis.
    """

    sent: list[int]
    received: list[int]
    counts: Tensor
    order: Tensor
    back: Tensor
    group: dist.ProcessGroup

    def reverse(self) -> "_Routes":
        """Return the routes of the answers."""
        return _Routes(
            sent=self.received,
            received=self.sent,
            counts=self.counts,
            order=self.order,
            back=self.back,
            group=self.group,
        )

    def start(self, x: Tensor) -> Tensor:
        """Start an all-to-all of the rows of `x`; `_Exchange` waits for the result."""
        return _all_to_all(x.detach(), self.received, self.sent, self.group)


def _all_to_all(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    started: Tensor = _ops.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return started


@torch.no_grad()
def _find_routes(counts: Tensor, group: dist.ProcessGroup) -> _Routes:
    """Exchange the counts [E] of rows for every expert, and return the routes."""
    ranks = group.size()
    here = len(counts) // ranks
    equal = [here] * ranks
    arriving = _ops.wait_tensor(_all_to_all(counts, equal, equal, group))
    by_rank = torch.stack([counts.view(ranks, here), arriving.view(ranks, here)]).sum(-1)
    # One copy to the host, which waits for the device: all-to-all needs its sizes there.
    sent, received = by_rank.tolist()
    experts = torch.arange(here, device=counts.device).repeat(ranks)
    rows = experts.repeat_interleave(arriving, output_size=sum(received))
    order = rows.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return _Routes(
        sent=sent,
        received=received,
        counts=arriving.view(ranks, here).sum(0),
        order=order,
        back=back,
        group=group,
    )


class _Exchange(torch.autograd.Function):
    """Waits for an all-to-all that was started; its gradient is sent back, times a factor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: list[Tensor], routes: _Routes, factor: float
    ) -> Tensor:
        ctx.routes, ctx.factor = routes, factor
        arrived: Tensor = _ops.wait_tensor(pending.pop())
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _ops.wait_tensor(ctx.routes.reverse().start(grad))
        return back * ctx.factor, None, None, None


class _Permute(torch.autograd.Function):
    """Permutes rows; the backward gathers by the inverse, where autograd's would add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None
