"""How a module computes under each tensor style.

`lightning_par.plan.tensor_styles` says what a style means and how to add one. A function here runs
instead of the module's forward, while the module's parameters stand for their local shards; see
Note [Local computation] in `lightning_par.engine.tensor.apply`.

A function takes the module, its original forward, the `Region` with the ``tp`` group, and the
positional and keyword arguments of the call, and returns what the module returns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_par.engine.collectives import (
    copy_to_group,
    gather_from_shards,
    slice_to_shard,
    split_sizes,
)
from lightning_par.engine.tensor.huggingface_layers import (
    expert_shards,
    fused_qkv_transposed,
    rowwise_transposed,
    whole_inside,
)
from lightning_par.engine.tensor.parameters import swap
from lightning_par.engine.tensor.sequence_parallel import on_first_tensor, Region, SEQUENCE_DIM
from lightning_par.engine.tensor.vocab_parallel import VocabShardedLogits
from lightning_par.errors import PlanError
from lightning_par.plan.tensor_styles import TensorStyle

__all__ = ["STYLE_FUNCTIONS", "Style", "plain"]

Forward = Callable[..., Any]
Style = Callable[[nn.Module, Forward, Region, tuple[Any, ...], dict[str, Any]], Any]


def plain(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the module on its local shards."""
    return call(*args, **kwargs)


def _colwise_gather_output(
    module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Gather the output features."""
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    size = int(module.out_features)  # type: ignore[arg-type]
    return gather_from_shards(call(*args, **kwargs), -1, ctx.group, size)


def _rowwise(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Sum the partial outputs, then add the whole bias, which must not be summed."""
    bias = module._parameters.get("bias")
    swap(module, "bias", None)
    try:
        out = call(*args, **kwargs)
    finally:
        swap(module, "bias", bias)
    out = ctx.leave(out)
    return out if bias is None else out + bias


def _vocab_embedding(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Look up the ids of this rank's rows, give 0 for all others, and sum over the ranks."""
    if getattr(module, "max_norm", None):
        raise PlanError("vocab_embedding: an embedding with max_norm stays 'replicated'.")
    (ids,) = args or tuple(kwargs.values())
    weight = module._parameters["weight"]
    assert weight is not None
    sizes = split_sizes(int(module.num_embeddings), ctx.group.size())  # type: ignore[arg-type]
    start = sum(sizes[: ctx.group.rank()])
    inside = (ids >= start) & (ids < start + weight.shape[0])
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # the row is looked up as any other, but gets no gradient
        local = padding - start if start <= padding < start + weight.shape[0] else None
        module.padding_idx = local  # type: ignore[assignment]
    try:
        out = call(torch.where(inside, ids - start, 0))
    finally:
        if padding is not None:
            module.padding_idx = padding
    return ctx.leave(torch.where(inside.unsqueeze(-1), out, 0))


def _vocab_head(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Compute the logits of this rank's part of the vocabulary, and keep them so."""
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    size = int(module.out_features)  # type: ignore[arg-type]
    return VocabShardedLogits.wrap(call(*args, **kwargs), size, ctx.group)


def _gather_sequence(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run a container of colwise and rowwise modules on its whole input."""
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    return call(*args, **kwargs)


def _split_sequence(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the module on all T tokens and keep this rank's T/tp of the output."""
    out = call(*args, **kwargs)
    return slice_to_shard(out, SEQUENCE_DIM, ctx.group) if ctx.sequence_parallel else out


def _whole_sequence(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run a container on all T tokens, alike on every rank."""
    if ctx.sequence_parallel:
        args, kwargs = on_first_tensor(ctx.gather, (args, kwargs))
    return call(*args, **kwargs)


def _sequence_gather_output(
    module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Run the module on this rank's T/tp tokens and make the output whole."""
    out = call(*args, **kwargs)
    return ctx.gather(out) if ctx.sequence_parallel else out


def _experts(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Sum the experts' partial outputs; the gradients of the routing weights are partial too."""
    hidden, weights, *rest = args
    weights = copy_to_group(weights, ctx.group)
    mixed, other = call(ctx.enter(hidden), weights, *rest, **kwargs)
    return ctx.leave(mixed), other


STYLE_FUNCTIONS: Mapping[TensorStyle, Style] = {
    "colwise_gather_output": _colwise_gather_output,
    "expert_shards": expert_shards,
    "experts": _experts,
    "fused_qkv_transposed": fused_qkv_transposed,
    "gather_sequence": _gather_sequence,
    "rowwise": _rowwise,
    "rowwise_transposed": rowwise_transposed,
    "sequence_gather_output": _sequence_gather_output,
    "split_sequence": _split_sequence,
    "vocab_embedding": _vocab_embedding,
    "vocab_head": _vocab_head,
    "whole_inside": whole_inside,
    "whole_sequence": _whole_sequence,
}
"""The styles whose modules compute something else than `plain`."""
