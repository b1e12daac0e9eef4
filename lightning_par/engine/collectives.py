"""Collectives with a gradient, in conjugate pairs over one process group.

Shapes: B batch, T tokens, D model dim; n is the size of the group, "shard" is the slice of
this rank.

===============  ======================  ===============================================
forward          backward                used where
===============  ======================  ===============================================
copy (identity)  all-reduce              whole input of sharded weights
all-reduce       identity                partial output -> whole
all-gather       reduce-scatter          shard -> whole, used by sharded weights
reduce-scatter   all-gather              partial output -> shard
slice            own slice, 0 elsewhere  whole -> shard, computed alike on every rank
all-gather       slice                   shard -> whole, used alike on every rank
===============  ======================  ===============================================

Note [Name of a finished all-gather]: the two threads of a gloo group write the name of the
collective that each has just run to one string, without a lock (torch 2.13), after whoever waited
for it may go on. A name of up to 15 letters lies in the string itself; a longer one has memory of
its own, which two threads at once free twice, or write to after it was freed: once in some ten
thousand times a rank dies by SIGSEGV or SIGABRT. The one long name of a CPU's collectives is that
of functional all-gathers. They run as `allgather` therefore, whoever calls them: DTensor, compiled
code, a user's own.

**Source**: Shoeybi et al. 1909.08053, section 3 (f and g); Korthikanti et al. 2205.05198, section
4.2.2.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.library import Library

from lightning_par.errors import ConfigurationError
from lightning_par.upstream.dispatch import count_of_modes
from lightning_par.upstream.distributed import default_store, functional_operators

__all__ = [
    "all_gather",
    "all_reduce",
    "apply_function",
    "copy_to_group",
    "gather_from_shards",
    "gather_partial",
    "meet",
    "reduce_scatter",
    "reduce_to_shards",
    "reduce_to_whole",
    "refuses_second_gradient",
    "shard_of_whole",
    "slice_to_shard",
    "split_sizes",
]

_ops = functional_operators


def split_sizes(size: int, parts: int) -> list[int]:
    """Return the sizes that `torch.chunk` and DTensor give to `parts` ranks; later ones may be
    smaller or 0.

    Args:
        size: Size of the dim that is sharded.
        parts: Number of ranks.
    """
    # ceil: all shards but the last ones have the same size, as torch.chunk gives them.
    step = -(-size // parts)
    return [max(0, min(step, size - step * i)) for i in range(parts)]


def meet(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Wait until every rank of a group has called this as often as this one.

    Unlike a collective it is never taken for another one: a rank that calls it alone waits, and the
    collectives of the others stay as they are.

    Args:
        group: Whose ranks meet.
        timeout: How long one waits for the others; None: as long as torch does by default.

    **Communicates**: two messages with the store by which the ranks of the run have met.
    """
    if group.size() == 1:
        return
    store, name = default_store(), f"lightning_par/meet/{group.group_name}"
    # `add` counts all arrivals: each group of n of them is one turn.
    turn, place = divmod(store.add(name, 1) - 1, group.size())
    if place + 1 == group.size():
        store.set(f"{name}/{turn}", "")
    store.wait([f"{name}/{turn}"], timeout or default_pg_timeout)


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction of `x` over the group; `x` is left alone.

    **Communicates**: one all-reduce of `x`.
    """
    # Functional collectives can be traced by torch.compile, and give a new tensor.
    out: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.group_name))
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup, size: int | None = None) -> Tensor:
    """Return the shards of all ranks joined along `dim`.

    Args:
        x: The shard of this rank.
        dim: Where to join.
        group: The ranks, in order.
        size: Whole size of `dim`, if it does not divide by the group (shards as `split_sizes` gives
            them).

    **Communicates**: one all-gather whose result has `size` (or n * shard) entries in `dim`.
    """
    ranks, dim = group.size(), dim % x.ndim
    # The collective wants equal shards: later, smaller ones are padded, and the end is cut off.
    # Collectives move equal shards.
    step = x.shape[dim] if size is None else -(-size // ranks)
    if x.shape[dim] < step:
        missing = step - x.shape[dim]
        x = torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)
    x = x.contiguous()
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    is_plain = type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
    # As the kernel below, in a third of its time; it has no gradient, and `CommDebugMode` of torch
    # does not know it.
    if is_plain and not needs_grad and not count_of_modes():
        out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        out = _ops.all_gather_into_tensor_out(x, ranks, group.group_name, out=out)
    else:
        out = _ops.all_gather_into_tensor(x, ranks, group.group_name)
    out = _ops.wait_tensor(out)
    # all_gather_into_tensor joins along dim 0: [n * shard, ...] is cut and joined along `dim`.
    joined: Tensor = out if dim == 0 else torch.cat(out.chunk(ranks), dim)
    if size is not None and size != joined.shape[dim]:
        joined = torch.narrow(joined, dim, 0, size).contiguous()
    return joined


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum of `x` over the group.

    Args:
        x: The partial sum of this rank.
        dim: Where to shard; shards are as `split_sizes` gives them.
        group: The ranks, in order.

    **Communicates**: one reduce-scatter of `x`.
    """
    ranks, dim, size = group.size(), dim % x.ndim, x.shape[dim]
    if size % ranks:  # the collective wants equal shards
        missing = -size % ranks
        x = torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)
    if dim != 0:
        # reduce_scatter_tensor cuts dim 0: the parts along `dim` are laid one after the other.
        x = torch.cat(x.chunk(ranks, dim))
    out = _ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group.group_name)
    shard: Tensor = _ops.wait_tensor(out)
    if size % ranks:
        shard = shard.narrow(dim, 0, split_sizes(size, ranks)[group.rank()]).contiguous()
    return shard


def _shard(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sizes = split_sizes(x.shape[dim], group.size())
    shard: Tensor = x.split(sizes, dim)[group.rank()].contiguous()
    return shard


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # A view: an output that is the input itself would be no node of autograd's.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each of a pair is the backward of the other, so that backwards have gradients, too.
        return reduce_to_whole(grad, ctx.group), None


class _ReduceToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to_group(grad, ctx.group), None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, size: int | None
    ) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_to_shards(grad, ctx.dim, ctx.group), None, None, None


class _ReduceToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_partial(grad, ctx.dim, ctx.group, ctx.size), None, None


class _SliceToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.shape, ctx.group = dim, x.shape, group
        return _shard(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Zeros for the tokens of other ranks, whose own slices have their gradients.
        whole = grad.new_zeros(ctx.shape)
        sizes = split_sizes(whole.shape[ctx.dim], ctx.group.size())
        whole.split(sizes, ctx.dim)[ctx.group.rank()].copy_(grad)
        return whole, None, None


class _GatherFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # No sum: every rank has the same gradient of what it uses alike.
        return shard_of_whole(grad, ctx.dim, ctx.group), None, None, None


class _ShardOfShared(torch.autograd.Function):
    """The shard of what every rank has alike, as its gradient: not partial, as of a slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _shard(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_from_shards(grad, ctx.dim, ctx.group, ctx.size), None, None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`; its gradient is summed over the group."""
    return apply_function(_CopyToGroup, x, group)


def reduce_to_whole(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the partial `x` over the group; every rank uses it alike."""
    return apply_function(_ReduceToWhole, x, group)


def gather_partial(
    x: Tensor, dim: int, group: dist.ProcessGroup, size: int | None = None
) -> Tensor:
    """Return the whole of the shards `x`; the gradients of the ranks are partial and are summed.

    Args:
        x: The shard of this rank.
        dim: Where the shards join.
        group: The ranks, in order.
        size: Whole size of `dim`, if it does not divide by the group.
    """
    return apply_function(_GatherPartial, x, dim, group, size)


def reduce_to_shards(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the sum of the partial `x` over the group."""
    return apply_function(_ReduceToShards, x, dim, group)


def slice_to_shard(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the whole `x`; the gradient is 0 outside of this rank's
    slice.

    Parameters that made `x` therefore have partial gradients, to be summed over the group.
    """
    return apply_function(_SliceToShard, x, dim, group)


def gather_from_shards(x: Tensor, dim: int, group: dist.ProcessGroup, size: int) -> Tensor:
    """Return the whole of the shards `x`, which every rank then uses alike.

    Args:
        x: The shard of this rank.
        dim: Where the shards join.
        group: The ranks, in order.
        size: Whole size of `dim`; it may be uneven.
    """
    return apply_function(_GatherFromShards, x, dim, group, size)


def shard_of_whole(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the whole `x`, which every rank has alike, as its gradient is."""
    return apply_function(_ShardOfShared, x, dim, group)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ConfigurationError(
            "LP320",
            "the step computes a gradient of a gradient (create_graph=True), but an operation in "
            "it has no second derivative on this mesh. If it is the cross-entropy of logits "
            "sharded over the vocabulary, give the head the style 'colwise_gather_output' in "
            "ParallelPlan(tensor=...). If tokens are sent to experts of other ranks, use "
            "expert_parallel_size=1. If attention runs on divided sequences, use "
            "context_parallel_size=1. If the step reads a sharded parameter, use a zero_stage "
            "below 3.",
        )


def refuses_second_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the gradients that the backward of a `torch.autograd.Function` returns raise if they are
    differentiated. Unlike torch's `once_differentiable` also where no gradient that comes in has a
    graph, as behind a sum.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        # Without a graph: only what is returned tells that it cannot be differentiated again.
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        # An input that requires a gradient, so that `_NoGradient` becomes a node of the graph.
        anchor = torch.zeros((), requires_grad=True)
        given = [g if g is None else apply_function(_NoGradient, g, anchor) for g in found]
        return tuple(given)

    return run


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call `function.apply`, typed: torch does not annotate it, and all of ours return a tensor."""
    out: Tensor = function.apply(*args)
    return out


def _gather_on_cpu(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, async_op: bool = True
) -> Any:
    """Gather into tensors of a CPU; see Note [Name of a finished all-gather]."""
    # Called as an operator, which releases the GIL: a thread of gloo may need it.
    gather, size = torch.ops.c10d.allgather_.default, dist.ProcessGroup.unbox(group).size()
    shards = [[*output.chunk(size)] for output in outputs]
    works = [gather([s], [x], group, async_op)[1] for s, x in zip(shards, inputs, strict=True)]
    # All but the last one, which the caller waits for.
    for work in works[:-1]:
        work.wait()
    return works[-1]


# For as long as the process lives.
_KERNELS = Library("c10d", "IMPL")
with warnings.catch_warnings():
    # Torch warns that there is a kernel already.
    warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
    _KERNELS.impl("allgather_into_tensor_coalesced_", _gather_on_cpu, "CPU")
