"""Tensor-parallel styles for layers of transformers: transposed weights, fused qkv, expert shards.

Shapes: B batch, T tokens, D model dim, E experts, K experts of a token; a rank holds T/tp tokens or
E/tp experts. Each style is called while the module's parameters stand for this rank's shards; see
Note [Local computation] in `lightning_par.engine.tensor.apply`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.collectives import apply_function, copy_to_group, reduce_to_whole
from lightning_par.engine.tensor.sequence_parallel import Region
from lightning_par.engine.tensor_tree import on_first_tensor
from lightning_par.upstream.transformers import mark_as_expert_parallel

__all__ = [
    "divide_first",
    "enter_region",
    "expert_shards",
    "fused_qkv_transposed",
    "leave_region",
    "let_gradients_reach",
    "rowwise_transposed",
    "whole_inside",
]

_Forward = Callable[..., Any]
_PARTS = "_lightning_par_expert_parts"


class _Depend(torch.autograd.Function):
    """Returns `out`, and lets its gradient reach `count` inputs and idle parameters in any case.

    A rank whose experts no token chose would leave the others alone in the collectives of the
    backward, and its parameters without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, count: int, *others: Tensor) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(*others[count:])
        # view_as: an output that is the input itself would be no new node of the graph.
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *[None] * ctx.count, *map(torch.zeros_like, ctx.saved_tensors)


def divide_first(module: nn.Module, parts: int) -> None:
    """Let `expert_shards` divide each of several parts of the experts.

    Args:
        module: Holds the experts; its forward, inside of the style, takes those of all parts.
        parts: Number of ranks with other tokens, over which experts are divided.
    """
    module.__dict__[_PARTS] = parts


def let_gradients_reach(module: nn.Module, out: Tensor, *inputs: Tensor) -> Tensor:
    """Return what experts gave for their tokens, or for none, with the gradients of one process:
    zeros for parameters that no token used.

    Args:
        module: Holds the experts.
        out: Its output.
        inputs: What a backward has to reach in any case.
    """
    idle = () if out.requires_grad else tuple(module.parameters(recurse=False))
    return apply_function(_Depend, out, len(inputs), *inputs, *idle)


def rowwise_transposed(
    module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Run a layer with a rowwise shard of a weight [in, out], and sum the partial outputs.

    **Communicates**: one all-reduce, or reduce-scatter over T, of the output.
    """
    parameters: dict[str, Any] = module._parameters
    bias = parameters["bias"]
    # A bias that each rank adds would be summed tp times: it is added once, below.
    parameters["bias"] = torch.zeros_like(bias)  # such a layer cannot do without one
    try:
        out = call(*args, **kwargs)
    finally:
        parameters["bias"] = bias
    return ctx.leave(out) + bias


def fused_qkv_transposed(
    module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Run a layer [in, 3 out] of query, key and value with the columns of this rank's heads."""
    parameters: dict[str, Any] = module._parameters
    whole = {name: parameters[name] for name in ("weight", "bias")}
    try:
        for name, value in whole.items():
            # The fused weight is replicated: a shard of its columns would cut through q, k and v.
            parts = value.unflatten(-1, (3, ctx.group.size(), -1))
            parameters[name] = parts.select(-2, ctx.group.rank()).flatten(-2)
        return call(*args, **kwargs)
    finally:
        parameters.update(whole)


def expert_shards(
    module: nn.Module,
    call: _Forward,
    ctx: Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the experts of this rank and sum over the ranks.

    Called with the tokens [B T, D], expert indices [B T, K] and weights [B T, K], all whole. The
    work of a rank is that of the tokens that chose its experts.

    **Communicates**: one all-reduce of [B T, D] forward; of that and of [B T, K] backward.
    """
    hidden, index, weights = (*args, *kwargs.values())
    held, ranks = next(module.parameters(recurse=False)).shape[0], ctx.group.size()
    mark_as_expert_parallel(module)  # lets fused kernels of transformers skip index E
    # Ranks with other tokens may divide the experts first, see `ExpertParallel.placed`.
    part, local = index // (held * ranks), index % (held * ranks)
    mine = local // held == ctx.group.rank()
    local = part * held + local % held
    none = held * getattr(module, _PARTS, 1)
    # copy_to_group: identity forward, all-reduce backward, as each rank has a part of the
    # gradient.
    weights = torch.where(mine, copy_to_group(weights, ctx.group), 0)
    hidden = copy_to_group(hidden, ctx.group)
    # The index one past the last expert of this rank makes transformers skip the token, whose
    # weight is 0 besides.
    out = call(hidden, torch.where(mine, local, none), weights)
    out = let_gradients_reach(module, out, hidden, weights)
    return reduce_to_whole(out, ctx.group)


def whole_inside(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run a container on all T tokens, alike on every rank, and keep this rank's T/tp of the
    output.
    """
    if not ctx.sequence_parallel:
        return call(*args, **kwargs)
    args, kwargs = on_first_tensor(ctx.gather, (args, kwargs))
    return on_first_tensor(ctx.cut, call(*args, **kwargs))


def enter_region(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the first block on this rank's T/tp of its input, which is whole."""
    args, kwargs = on_first_tensor(ctx.cut, (args, kwargs))
    return call(*args, **kwargs)


def leave_region(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the last block and make its output whole."""
    return on_first_tensor(ctx.gather, call(*args, **kwargs))
