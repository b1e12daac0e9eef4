"""Tensor parallelism: weights are DTensor shards, modules compute on them locally.

Shapes: B batch, T tokens, D model dim, N heads; a rank holds D/tp features or T/tp tokens.

Note [Local computation]: parameters are DTensors, so that optimizers, norms and checkpoints know
what they hold; inside a module's forward they stand for their local shards, and the collectives are
explicit. No operation of the model is dispatched through DTensor. With sequence parallelism the
activations between the modules are shards along T, and the pair all-reduce + identity becomes
all-gather + reduce-scatter, which moves the same bytes.

**Source**: Shoeybi et al. 1909.08053; Korthikanti et al. 2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_par.engine.collectives import (
    copy_to_group,
    gather_from_shards,
    slice_to_shard,
    split_sizes,
)
from lightning_par.engine.init.deferred_init import seed_generators
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.tensor.huggingface_layers import (
    enter_region,
    expert_shards,
    fused_qkv_transposed,
    leave_region,
    rowwise_transposed,
    whole_inside,
)
from lightning_par.engine.tensor.sequence_parallel import Region, Regions, SEQUENCE_DIM
from lightning_par.engine.tensor.vocab_parallel import VocabShardedLogits
from lightning_par.errors import PlanError
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.upstream.dispatch import any_true_operator

__all__ = [
    "TensorParallel",
    "apply_tensor_parallel",
    "local_parameters",
    "shard_parameter",
    "tensor_placements",
]


@register_sharding(any_true_operator)  # type: ignore[untyped-decorator]
def _any_true(flags: Any) -> list[Any]:
    """Let autograd's anomaly detection look for NaN in a DTensor; torch has no rule for it."""
    return [([Replicate()], [Replicate()])]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallel:
    """What tensor parallelism means for the parameters of one model.

    Attributes:
        mesh: The ``tp`` axis.
        placements: FQN of a parameter -> how it is placed on the axis; every parameter is listed.
        partial: FQNs of whole parameters of which each rank computes a part of the gradient.
    """

    mesh: DeviceMesh
    placements: Mapping[str, Placement]
    partial: frozenset[str]


def _shard_between_blocks(
    modules: Mapping[str, nn.Module], block_names: Sequence[str], region: Region
) -> None:
    """Cut the input of the first block along T, and make the output of the last one whole."""
    for fqn, style in ((block_names[0], enter_region), (block_names[-1], leave_region)):
        if fqn in modules:
            _wrap_forward(modules[fqn], style, region)


def apply_tensor_parallel(
    model: nn.Module, resolved: ResolvedPlan, mesh: DeviceMesh, *, sequence_parallel: bool
) -> TensorParallel:
    """Make every module with a style compute its share; parameters are sharded later, by
    `shard_parameter`.

    Args:
        model: Parameters may be on meta. Modules of other pipeline stages may be missing.
        resolved: The resolved plan.
        mesh: The 1-D ``tp`` axis.
        sequence_parallel: Shard the activations between the modules along T (dim 1).

    Returns:
        How each parameter is placed.

    Raises:
        PlanError: A module has an option that its style cannot keep.
    """
    group = mesh.get_group()
    regions = Regions(resolved, group, sequence_parallel=sequence_parallel)
    partial_names: set[str] = set()
    modules = {n: m for n, m in model.named_modules() if not isinstance(m, StageStub)}
    for fqn, style in resolved.styles.items():
        if fqn not in modules:
            continue
        module, region = modules[fqn], regions.of(fqn)
        _wrap_forward(module, _STYLES[style], region)
        shards_tokens = region.sequence_parallel
        if style in _PARTIAL_ALWAYS or (shards_tokens and style in _PARTIAL_WITH_SEQUENCE):
            partial_names |= {f"{fqn}.{n}" for n, _ in module.named_parameters(recurse=False)}
        if style in ("rowwise", "rowwise_transposed") and shards_tokens:
            partial_names.add(f"{fqn}.bias")
    for fqn, names in resolved.divided.items():
        for name in names if fqn in modules else ():
            setattr(modules[fqn], name, getattr(modules[fqn], name) // group.size())
    if sequence_parallel:
        for fqn in resolved.block_names:
            if fqn in modules and _draws_random_numbers(modules[fqn]):
                _separate_random_numbers(modules[fqn], group.rank())
    if sequence_parallel and resolved.plan.sequence_region == "blocks":
        _shard_between_blocks(modules, resolved.block_names, regions.sharded)
    placements = tensor_placements(model, resolved)
    return TensorParallel(
        mesh=mesh, placements=placements, partial=frozenset(partial_names & set(placements))
    )


def tensor_placements(model: nn.Module, resolved: ResolvedPlan) -> dict[str, Placement]:
    """Return how every parameter is placed on the ``tp`` axis, ties under each of their names.

    Args:
        model: Parameters may be on meta; those that are not here are left out.
        resolved: The resolved plan.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    sharded: dict[int, Placement] = {}
    for fqn, parameter in named.items():
        owner, _, name = fqn.rpartition(".")
        placement = _placement(resolved.styles.get(owner, "replicated"), name)
        # A tie may have names without a style, or whole ones: all mean the sharded parameter.
        if isinstance(placement, Shard):
            sharded[id(parameter)] = placement
    return {fqn: sharded.get(id(p), Replicate()) for fqn, p in named.items()}


def shard_parameter(
    full: Tensor, placements: Sequence[Placement], mesh: DeviceMesh, *, requires_grad: bool
) -> nn.Parameter:
    """Return this rank's part of a parameter as a DTensor.

    Args:
        full: The whole value, the same on every rank.
        placements: For every axis of `mesh`, Shard of a dim of its own or Replicate; an uneven
            shard is cut as `split_sizes` says.
        mesh: The ``tp`` axis, or those of the experts.
        requires_grad: Of the parameter.
    """
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes = split_sizes(full.shape[placement.dim], mesh.size(axis))
            local = local.split(sizes, placement.dim)[mesh.get_local_rank(axis)]
    if local is not full:
        local = local.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(sharded, requires_grad=requires_grad)


def _placement(style: str, name: str) -> Placement:
    if style in _SHARDS_ROWS or (style == "colwise_transposed" and name == "bias"):
        return Shard(0)
    if style == "rowwise_transposed" and name == "weight":
        return Shard(0)
    if style in ("expert_colwise", "expert_rowwise"):
        return Shard(1 if style == "expert_colwise" else 2)
    columns = style in ("rowwise", "colwise_transposed") and name == "weight"
    return Shard(1) if columns else Replicate()


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Let the module's own parameters stand for their local shards while its forward runs."""
    items = cast(dict[str, Any], module._parameters).items()
    saved = {name: value for name, value in items if isinstance(value, DTensor)}
    try:
        for name, parameter in saved.items():
            _swap(module, name, parameter.to_local())
        yield
    finally:
        for name, parameter in saved.items():
            _swap(module, name, parameter)


def _swap(module: nn.Module, name: str, value: Any) -> None:
    """Set what ``module.name`` means, without the checks that make it a registered parameter."""
    module._parameters[name] = value


_Forward = Callable[..., Any]
_Style = Callable[[nn.Module, _Forward, Region, tuple[Any, ...], dict[str, Any]], Any]


def _wrap_forward(module: nn.Module, style: _Style, context: Region) -> None:
    original = module.forward
    direct = next(module.parameters(recurse=False), None) is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not direct:
            return style(module, original, context, args, kwargs)
        with local_parameters(module):
            return style(module, original, context, args, kwargs)

    module.forward = forward


def _plain(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _colwise_gather_output(
    module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    size = int(module.out_features)  # type: ignore[arg-type]
    return gather_from_shards(call(*args, **kwargs), -1, ctx.group, size)


def _rowwise(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    bias = module._parameters.get("bias")
    _swap(module, "bias", None)
    try:
        out = call(*args, **kwargs)
    finally:
        _swap(module, "bias", bias)
    out = ctx.leave(out)
    return out if bias is None else out + bias


def _vocab_embedding(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
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


def _vocab_head(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    size = int(module.out_features)  # type: ignore[arg-type]
    return VocabShardedLogits.wrap(call(*args, **kwargs), size, ctx.group)


def _gather_sequence(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    return call(*args, **kwargs)


def _split_sequence(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    out = call(*args, **kwargs)
    return slice_to_shard(out, SEQUENCE_DIM, ctx.group) if ctx.sequence_parallel else out


def _whole_sequence(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    if ctx.sequence_parallel:
        args, kwargs = _on_first_tensor(ctx.gather, args, kwargs)
    return call(*args, **kwargs)


def _sequence_gather_output(
    module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any
) -> Any:
    out = call(*args, **kwargs)
    return ctx.gather(out) if ctx.sequence_parallel else out


def _experts(module: nn.Module, call: _Forward, ctx: Region, args: Any, kwargs: Any) -> Any:
    """Every rank gives a part of each answer; so the gradient of an answer's weight is partial."""
    hidden, weights, *rest = args
    weights = copy_to_group(weights, ctx.group)
    mixed, other = call(ctx.enter(hidden), weights, *rest, **kwargs)
    return ctx.leave(mixed), other


_STYLES: Mapping[str, _Style] = {
    "colwise": _plain,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_transposed": _plain,
    "expert_colwise": _plain,
    "expert_rowwise": _plain,
    "expert_shards": expert_shards,
    "experts": _experts,
    "fused_qkv_transposed": fused_qkv_transposed,
    "gather_sequence": _gather_sequence,
    "replicated": _plain,
    "replicated_with_grad_allreduce": _plain,
    "rowwise": _rowwise,
    "rowwise_transposed": rowwise_transposed,
    "sequence_gather_output": _sequence_gather_output,
    "sequence_parallel": _plain,
    "split_sequence": _split_sequence,
    "vocab_embedding": _vocab_embedding,
    "vocab_head": _vocab_head,
    "whole_inside": whole_inside,
    "whole_sequence": _whole_sequence,
}
_SHARDS_ROWS = (
    "colwise",
    "colwise_gather_output",
    "expert_shards",
    "vocab_embedding",
    "vocab_head",
)
_PARTIAL_ALWAYS = ("fused_qkv_transposed", "replicated_with_grad_allreduce")
_PARTIAL_WITH_SEQUENCE = ("sequence_gather_output", "sequence_parallel", "split_sequence")


def _on_first_tensor(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `function` to the first argument that is a tensor: the hidden states."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], function(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: function(value)}
    raise PlanError("a module with a tensor style was called without a tensor.")


def _draws_random_numbers(block: nn.Module) -> bool:
    rates = [getattr(m, name, 0) for m in block.modules() for name in ("p", "dropout", "dropout_p")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _separate_random_numbers(block: nn.Module, tp_rank: int) -> None:
    """Draw other random numbers on every rank inside the block: each holds other tokens, then other
    heads.

    The seed comes from the state that all ranks share, which moves on alike, and is restored
    afterwards.
    """
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return original(*args, **kwargs)
        seed = int(torch.randint(2**62, ())) + tp_rank
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        devices = [device] if device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type="cuda"):
            seed_generators(seed, device)
            return original(*args, **kwargs)

    block.forward = forward
