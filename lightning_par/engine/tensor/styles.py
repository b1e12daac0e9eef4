"""How a module computes under each tensor style.

`lightning_par.plan.tensor_styles` says what a style means and how to add one. A function here runs
instead of the module's forward, while the module's parameters stand for their local shards; see
Note [Local computation] in `lightning_par.engine.tensor.apply`.

A function takes the module, its original forward, the `Region` with the ``tp`` group, and the
positional and keyword arguments of the call, and returns what the module returns.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, ExitStack
from typing import Any, cast

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.collectives import (
    copy_to_group,
    gather_from_shards,
    split_sizes,
)
from lightning_par.engine.tensor.chunked_logits import ChunkedLogits
from lightning_par.engine.tensor.huggingface_layers import (
    expert_shards,
    fused_qkv_transposed,
    rowwise_transposed,
    whole_inside,
)
from lightning_par.engine.tensor.sequence_parallel import Region
from lightning_par.engine.tensor.vocab_parallel import VocabShardedLogits
from lightning_par.engine.tensor_tree import on_first_tensor
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import PlanError
from lightning_par.plan.tensor_styles import TensorStyle
from lightning_par.upstream.tensor import own_attributes

__all__ = [
    "STYLE_FUNCTIONS",
    "Style",
    "apply_style",
    "copy_first_gradients",
    "local_parameter",
    "local_parameters",
]

Style = Callable[[nn.Module, Forward, Region, tuple[Any, ...], dict[str, Any]], Any]


def _plain(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the module on its local shards."""
    return call(*args, **kwargs)


def _gather_sequence(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Make the input whole along T: of a container of colwise and rowwise modules, or of one that
    has no container.
    """
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    return call(*args, **kwargs)


def _colwise_gather_output(
    module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Gather the output features."""
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    size = int(module.out_features)  # type: ignore[arg-type]
    out = call(*args, **kwargs)
    if isinstance(out, ChunkedLogits):  # which are whole to any code
        return out.sharded(size, ctx.group)
    # [..., V or D / tp] to [..., size]; the size is given, as later ranks may hold fewer columns.
    return gather_from_shards(out, -1, ctx.group, size)


def _rowwise(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Sum the partial outputs, then add the whole bias, which must not be summed."""
    bias = module._parameters.get("bias")
    # The layer computes without its bias: partial outputs are summed first.
    _swap(module, "bias", None)
    try:
        out = call(*args, **kwargs)
    finally:
        _swap(module, "bias", bias)
    out = ctx.leave(out)
    return out if bias is None else out + bias


def _vocab_embedding(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Look up the ids of this rank's rows, give 0 for all others, and sum over the ranks."""
    if getattr(module, "max_norm", None):
        raise PlanError(
            "LP207",
            "an embedding with max_norm cannot have the style 'vocab_embedding': its forward "
            "would change rows of the weight that other ranks hold. Remove max_norm and limit the "
            "norm of the rows in on_train_batch_end with torch.renorm, or use "
            "tensor_parallel_size=1.",
        )
    (ids,) = args or tuple(kwargs.values())
    weight = module._parameters["weight"]
    assert weight is not None
    # Rows [start, start + rows of this rank) of the vocabulary, as `split_sizes` cut them.
    sizes = split_sizes(int(module.num_embeddings), ctx.group.size())  # type: ignore[arg-type]
    start = sum(sizes[: ctx.group.rank()])
    inside = (ids >= start) & (ids < start + weight.shape[0])
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # the row is looked up as any other, but gets no gradient
        local = padding - start if start <= padding < start + weight.shape[0] else None
        module.padding_idx = local  # type: ignore[assignment]
    try:
        # Ids of other ranks look up row 0, and are set to 0 after: shapes stay static.
        out = call(torch.where(inside, ids - start, 0))
    finally:
        if padding is not None:
            module.padding_idx = padding
    # A sum with zeros of all other ranks: the row, bit for bit.
    return ctx.leave(torch.where(inside.unsqueeze(-1), out, 0))


def _vocab_head(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Compute the logits of this rank's part of the vocabulary, and keep them so."""
    args, kwargs = on_first_tensor(ctx.enter, (args, kwargs))
    size = int(module.out_features)  # type: ignore[arg-type]
    logits = call(*args, **kwargs)
    if isinstance(logits, ChunkedLogits):
        return logits.sharded(size, ctx.group)
    return VocabShardedLogits.wrap(logits, size, ctx.group)


def _split_sequence(module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Run the module on all T tokens and keep this rank's T/tp of the output."""
    out = call(*args, **kwargs)
    # keep_own: the gradient is 0 outside of this rank's tokens, and parameters sum over tp.
    return ctx.keep_own(out) if ctx.sequence_parallel else out


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
    # The routing weights are whole, and each rank's experts give a part of their gradient.
    weights = copy_to_group(weights, ctx.group)
    mixed, other = call(ctx.enter(hidden), weights, *rest, **kwargs)
    return ctx.leave(mixed), other


def _replicated_inside(
    module: nn.Module, call: Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    """Let a forward read the parameters of the modules inside."""
    # In one stack: all are put back, also when the forward raises.
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(local_parameters(part))
        return call(*args, **kwargs)


STYLE_FUNCTIONS: Mapping[TensorStyle, Style] = {
    "colwise_alone": _gather_sequence,
    "colwise_gather_output": _colwise_gather_output,
    "expert_shards": expert_shards,
    "experts": _experts,
    "fused_qkv_transposed": fused_qkv_transposed,
    "gather_sequence": _gather_sequence,
    "gather_sequence_heads": _gather_sequence,
    "replicated_inside": _replicated_inside,
    "rowwise": _rowwise,
    "rowwise_transposed": rowwise_transposed,
    "sequence_gather_output": _sequence_gather_output,
    "split_sequence": _split_sequence,
    "vocab_embedding": _vocab_embedding,
    "vocab_head": _vocab_head,
    "whole_inside": whole_inside,
    "whole_sequence": _whole_sequence,
}
"""The styles whose modules compute something else than `_plain`."""


def apply_style(module: nn.Module, style: TensorStyle | Style, region: Region) -> None:
    """Let a module compute as a style says, on the local shards of its own parameters.

    Args:
        module: Changed in place.
        style: The name of a style, or a function as described above.
        region: The ``tp`` group, and whether activations are sharded along T around the module.
    """
    run = STYLE_FUNCTIONS.get(style, _plain) if isinstance(style, str) else style
    # Asked once: a context for each call of a module without parameters costs microseconds.
    has_parameters = next(module.parameters(recurse=False), None) is not None

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not has_parameters:
                return run(module, inner, region, args, kwargs)
            # Around the style, which may swap parameters itself, and has to find local ones.
            with local_parameters(module):
                return run(module, inner, region, args, kwargs)

        return forward

    wrap_forward(module, around, "tensor_parallel")


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Replace a module's own DTensor parameters by their local shards within the context.

    Args:
        module: Changed in place; parameters of its submodules stay what they are.
    """
    # Of dict itself: what holds them may answer a user's step with whole tensors.
    items = dict.items(cast(dict[str, Any], module._parameters))
    saved = {name: value for name, value in items if isinstance(value, DTensor)}
    try:
        for name, parameter in saved.items():
            _swap(module, name, local_parameter(parameter, module))
        yield
    finally:
        for name, parameter in saved.items():
            _swap(module, name, parameter)


def local_parameter(parameter: DTensor, reader: nn.Module | None = None) -> Tensor:
    """Return the local shard of a parameter, to be computed with.

    Note [Gradients of one tensor]: autograd may give two operands the same tensor as gradient, or
    one of them a view of it, as a sum or a concatenation does with one sample. It knows from their
    number of references that neither may keep it as ``grad``, to which later gradients are added in
    place. `DTensor.to_local` hides this: its backward wraps each in a DTensor of its own. So a
    gradient that is about to become ``grad`` is copied first. Layers of torch compute those of
    their matrices afresh; these are not copied.

    Args:
        parameter: A parameter of a module.
        reader: The module whose forward computes with it; None: not known.
    """
    local = parameter.to_local()
    # nn.Linear and the like compute the gradient of a matrix by a product: it is nobody else's.
    is_fresh = type(reader).__module__.startswith("torch.nn.") and parameter.ndim > 1
    if torch.compiler.is_compiling():
        return local
    # Attributes that the user has set, which code may read from the weight.
    if len(vars(parameter)) > 1:  # beside torch's own mark
        vars(local).update(own_attributes(parameter))
    if not is_fresh:
        _copy_first(local, parameter)
    return local


def copy_first_gradients(module: nn.Module) -> None:
    """Copy the first gradients of parameters where compiled code does not let `local_parameter`.

    Args:
        module: Its parameters, which have their values, get hooks.
    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            _copy_first(parameter, parameter)


def _copy_first(computed: Tensor, parameter: Tensor) -> None:
    # Weakly: the hook of a tensor must not keep its parameter alive.
    held = weakref.ref(parameter)

    def copied(grad: Tensor) -> Tensor | None:
        kept = held()
        # Only the first gradient becomes `.grad` itself; later ones are added to it.
        return grad.clone() if kept is not None and kept.grad is None else None

    if computed.requires_grad:
        computed.register_hook(copied)


def _swap(module: nn.Module, name: str, value: Any) -> None:
    """Set what ``module.name`` means, without the checks that make it a registered parameter.

    Args:
        module: Changed in place.
        name: Name of one of its own parameters.
        value: A plain tensor, a parameter or None.
    """
    # Past nn.Module.__setattr__, which refuses a plain tensor in the place of a parameter.
    module._parameters[name] = value
