"""Token dispatch of expert parallelism: the all-to-all that brings rows to their experts and back.

Shapes: A rows (tokens times the experts of each) of this rank, M rows that arrive here, D model
dim, E experts, n ranks of the ``ep`` axis; a rank holds E/n experts.

Note [Overlapped exchange]: the all-to-all of the rows starts before, and is waited for after, the
work that `compute` is given to do beside it, such as shared experts.

Note [Padded parts]: NCCL takes the sizes of an all-to-all from the host. Parts of their own sizes
are read from the device, once a layer, and the host waits for it. Parts that are padded to a size
that holds whatever tokens choose need no read. Padding is at the end of the part for each rank, and
behind the rows of the last expert here. What experts compute of it may be NaN, or memory that was
never written; it goes nowhere, forward and backward, as indices leave it out. One read for all
layers is not possible, as a choice depends on the layers before it; an all-to-all that takes its
sizes from the device (torch's `all_to_all_vdev`) needs NVSHMEM, and buffers of the same worst case.

Note [Experts that sort their tokens]: experts of transformers have no `compute`. Their forward
takes tokens, the experts of each and the weights of these, and knows its number of experts. So
`compute` is that forward: a row is a token of one expert with the weight 1, and the number is that
of the experts here. Sorting and weighing stay with the rank that has the token.

**Source**: Lepikhin et al. 2006.16668 (GShard), section 3; Gale et al. 2211.15841 (no row dropped
or padded); for padded parts DeepEP's low-latency dispatch, whose buffers hold a given number of
tokens, too.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.collectives import apply_function, refuses_second_gradient
from lightning_par.engine.tensor.huggingface_layers import let_gradients_reach
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.distributed import functional_operators
from lightning_par.upstream.functions import replaced

__all__ = ["compute_by_forward", "computes_rows", "dispatch_tokens", "sorts_tokens"]


_ops = functional_operators


_Beside = Callable[[], Tensor] | None


def dispatch_tokens(
    module: nn.Module, group: dist.ProcessGroup, max_rows: int | None = None
) -> None:
    """Wrap `module.compute`, so that it gets the rows of all ranks for the local experts.

    Args:
        module: Changed in place; it has ``compute(rows, counts)``, which gives rows, or
            ``compute(rows, counts, beside)``, which also gives what ``beside()`` does.
        group: The ``ep`` axis.
        max_rows: Rows of every part, the same on every rank, see Note [Padded parts]; None: each
            part has the rows that tokens chose.

    Raises:
        ConfigurationError: Raised by the forward: a part may need more than `max_rows`.

    **Communicates**: E numbers, then A D values out and back over ``ep``, less those that stay;
    the values once more in the backward. With `max_rows`, n max_rows D in place of A D.
    """
    inner: Callable[..., Any] = module.compute  # type: ignore[assignment]
    takes_beside = len(inspect.signature(inner).parameters) > 2
    ranks = group.size()

    def compute(
        x: Tensor, counts: Tensor, beside: _Beside = None, capacity: int | None = None
    ) -> Any:
        if max_rows is None:
            routes = _exact_routes(counts, group)
        else:
            here = len(counts) // ranks
            _check_rows(len(x) if capacity is None else min(len(x), here * capacity), max_rows)
            routes = _padded_routes(len(x), counts, max_rows, group)
        # See Note [Overlapped exchange].
        # The order of the next lines: rows leave, shared experts compute meanwhile, rows arrive.
        leaving = routes.pack(x)
        pending = routes.parts.start(leaving)
        other = None if beside is None else beside()
        # `pending` in a list, as autograd would take a tensor for an input with a gradient.
        rows = apply_function(_Exchange, leaving, [pending], routes.parts, float(ranks))
        sorted_rows = routes.by_expert.apply(rows)
        if takes_beside:  # it was called already
            # `beside` has run: `compute` still expects one to call.
            answers, _ = inner(sorted_rows, routes.counts, lambda: None)
        else:
            answers = inner(sorted_rows, routes.counts)
        answers = routes.by_expert.inverse().apply(answers)
        # Answers go back along the same parts, reversed.
        home = routes.parts.reverse()
        out = apply_function(_Exchange, answers, [home.start(answers)], home, 1.0 / ranks)
        found = routes.unpack(out, len(x))
        return (found, other) if takes_beside else found

    module.compute = compute  # type: ignore[assignment]


def computes_rows(module: nn.Module) -> bool:
    """Whether a module with experts has a ``compute(rows, counts)`` of its own."""
    return callable(getattr(module, "compute", None))


def sorts_tokens(module: nn.Module) -> bool:
    """Whether a module sorts tokens by expert itself; see Note [Experts that sort their tokens].

    Args:
        module: Holds experts.
    """
    if computes_rows(module):
        return False
    takes = len(inspect.signature(module.forward).parameters)
    return takes == 3 and isinstance(getattr(module, "num_experts", None), int)


def compute_by_forward(module: Any, *, padded: bool) -> None:
    """Give a module that `sorts_tokens` a ``compute(rows, counts)``, by which its forward computes.

    Args:
        module: Changed in place.
        padded: Whether rows of no expert may follow.
    """
    inner: Forward = module.forward

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        held, size = len(counts), len(rows)
        out = torch.zeros_like(rows)
        if padded:  # what is left is one more kind, see Note [Padded parts]
            counts = torch.cat([counts, (size - counts.sum()).view(1)])
        kinds = torch.arange(len(counts), device=rows.device)
        kinds = kinds.repeat_interleave(counts, output_size=size)
        if padded:
            # Rows of zeros, as weights would get 0 times what may be NaN for a gradient.
            rows = torch.where((kinds < held)[:, None], rows, 0)
            kinds = kinds.clamp(max=held - 1)
        if size:
            ones = torch.ones_like(kinds, dtype=rows.dtype)
            with replaced(module, "num_experts", held):
                out = inner(rows, kinds[:, None], ones[:, None])
        return let_gradients_reach(module, out, rows)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = (*args, *kwargs.values())
        experts = index.flatten()
        # Stable: within an expert tokens keep their order, so sums do too.
        order = experts.argsort(stable=True)
        # One more kind counts tokens of experts that other ranks answer for.
        counts = torch.zeros(module.num_experts + 1, dtype=torch.int64, device=index.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts))[:-1]
        rows: Tensor = module.compute(hidden[order // index.shape[-1]], counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        weighted: Tensor = rows[back].unflatten(0, index.shape) * weights[..., None]
        return weighted.sum(-2).to(hidden.dtype)

    module.compute = compute
    wrap_forward(module, lambda _: forward, "compute_by_forward")


def _check_rows(most: int, max_rows: int) -> None:
    """Raise if tokens may choose more rows of one rank's experts than a padded part holds."""
    if most > max_rows:
        raise ConfigurationError(
            "LP319",
            f"expert_max_rows={max_rows}: in this forward up to {most} rows may be sent to the "
            "experts of one rank, since each token is sent as one row to each of its experts. Use "
            f"expert_max_rows={most} or more, or smaller batches. With expert_max_rows=None only "
            "the rows that are needed are sent, but the CPU waits for the GPU in each layer.",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """The parts of an all-to-all of rows.

    Attributes:
        sent: [n], number of rows for every rank, in the order of the ranks.
        received: [n], number of rows from every rank.
        group: The ``ep`` axis.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def reverse(self) -> "_Parts":
        """Return the parts of the answers."""
        return _Parts(sent=self.received, received=self.sent, group=self.group)

    def start(self, x: Tensor) -> Tensor:
        """Start an all-to-all of `x`; the result has to be waited for."""
        # Detached: `_Exchange` stands for the exchange in the graph.
        x, name = x.detach().contiguous(), self.group.group_name
        started: Tensor = _ops.all_to_all_single(x, self.received, self.sent, name)
        return started


@dataclass(frozen=True, kw_only=True, eq=False)
class _Permutation:
    """A permutation of rows, with padding among its inputs and outputs, or without.

    Attributes:
        order: Input row of every output row, int64; one past the last input row: a row of zeros.
        back: Output row of every input row, likewise.
        padded: Whether `order`, and whether `back`, names rows of zeros.
    """

    order: Tensor
    back: Tensor
    padded: tuple[bool, bool] = (False, False)

    def inverse(self) -> "_Permutation":
        """Return the permutation that brings every row back."""
        return _Permutation(order=self.back, back=self.order, padded=self.padded[::-1])

    def apply(self, x: Tensor) -> Tensor:
        """Permute rows."""
        return apply_function(_Permute, x, self.order, self.back, self.padded)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Routes:
    """The routes of the rows of one forward.

    Attributes:
        by_rank: Brings the rows of this rank into parts; None: they are in parts already, and
            after those that are sent there may be others, of no expert.
        parts: What is sent.
        by_expert: Sorts the rows that arrived by expert.
        counts: [E/n], number of rows of every local expert.
    """

    by_rank: _Permutation | None
    parts: _Parts
    by_expert: _Permutation
    counts: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows that are sent, in parts."""
        if self.by_rank is not None:
            return self.by_rank.apply(x)
        # Rows of no expert are last, and stay here.
        rows = sum(self.parts.sent)
        return x if rows == len(x) else x[:rows]

    def unpack(self, answers: Tensor, rows: int) -> Tensor:
        """Return the answers to all rows; 0 for those that were not sent."""
        if self.by_rank is not None:
            return self.by_rank.inverse().apply(answers)
        missing = rows - len(answers)
        if not missing:
            return answers
        return torch.cat([answers, answers.new_zeros(missing, *answers.shape[1:])])


def _exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the numbers [n, E/n] of rows that come from every rank for every local expert."""
    ranks = group.size()
    # Each rank sends E/n numbers to each.
    equal = [len(counts) // ranks] * ranks
    arriving: Tensor = _ops.wait_tensor(
        _Parts(sent=equal, received=equal, group=group).start(counts)
    )
    return arriving.view(ranks, -1)


def _sort_by_expert(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the order of rows, by expert and then as they are, and its inverse.

    Args:
        counts: [n, k]: number of rows in every part of every kind; parts are sorted by kind.
        size: Their sum.
    """
    # Parts are sorted by expert already: a stable sort keeps the order of ranks within one.
    kinds = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    order = kinds.repeat_interleave(counts.flatten(), output_size=size).argsort(stable=True)
    back = torch.empty_like(order)
    # The inverse permutation, without a second sort.
    back[order] = torch.arange(size, device=order.device)
    return order, back


@torch.no_grad()
def _exact_routes(counts: Tensor, group: dist.ProcessGroup) -> _Routes:
    """Return the routes in parts of their own sizes, given the rows [E] of every expert."""
    arriving = _exchange_counts(counts, group)
    # One copy to the host, which waits for the device: all-to-all needs its sizes there.
    sent, received = torch.stack([counts.view_as(arriving), arriving]).sum(-1).tolist()
    order, back = _sort_by_expert(arriving, sum(received))
    return _Routes(
        by_rank=None,
        parts=_Parts(sent=sent, received=received, group=group),
        by_expert=_Permutation(order=order, back=back),
        counts=arriving.sum(0),
    )


@torch.no_grad()
def _padded_routes(rows: int, counts: Tensor, size: int, group: dist.ProcessGroup) -> _Routes:
    """Return the routes of `rows` in parts of `size` rows, given the rows [E] of every expert."""
    ranks = group.size()
    total, places = ranks * size, torch.arange(rows, device=counts.device)
    leaving = counts.view(ranks, -1).sum(1)
    # Rows that no expert counts are those of one more rank, and are not sent.
    leaving = torch.cat([leaving, (rows - leaving.sum()).view(1)])
    rank = torch.arange(ranks + 1, device=counts.device)
    rank = rank.repeat_interleave(leaving, output_size=rows)
    # The place within the part of its rank: number of the row, less the first row of that rank.
    slots = places + rank * size - (leaving.cumsum(0) - leaving)[rank]
    slots = slots.clamp(max=total)
    # One more slot takes the rows that are not sent, and is cut off.
    filled = torch.full((total + 1,), rows, device=counts.device).scatter(0, slots, places)
    arriving = _exchange_counts(counts, group)
    # One more kind, behind the experts: rows of padding.
    padding = size - arriving.sum(1, keepdim=True)
    order, back = _sort_by_expert(torch.cat([arriving, padding], 1), total)
    here = arriving.sum(0)
    return _Routes(
        by_rank=_Permutation(order=filled[:-1], back=slots, padded=(True, True)),
        parts=_Parts(sent=[size] * ranks, received=[size] * ranks, group=group),
        by_expert=_Permutation(
            # Rows of padding give nothing back.
            order=order,
            back=torch.where(back < here.sum(), back, total),
            padded=(False, True),
        ),
        counts=here,
    )


class _Exchange(torch.autograd.Function):
    """Waits for an all-to-all that was started; its gradient is sent back, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: list[Tensor], parts: _Parts, factor: float) -> Tensor:
        ctx.parts, ctx.factor = parts, factor
        arrived: Tensor = _ops.wait_tensor(pending.pop())
        return arrived

    @staticmethod
    @refuses_second_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # In the backward rows go home as the answers did in the forward.
        back = _ops.wait_tensor(ctx.parts.reverse().start(grad))
        return back * ctx.factor, None, None, None


class _Permute(torch.autograd.Function):
    """Permutes rows; the backward gathers by the inverse, where autograd's would add up."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, back: Tensor, padded: tuple[bool, bool]
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.padded = padded[1]
        return _take(x, order, padded[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        # Gathered by the inverse: `index_add` would need atomics, and is not deterministic on
        # CUDA.
        return _take(grad, back, ctx.padded), None, None, None


def _take(x: Tensor, rows: Tensor, padded: bool) -> Tensor:
    """Return the rows of `x` at these places, of which one past the last is a row of zeros."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows] if padded else x[rows]
