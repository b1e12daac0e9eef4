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
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_par.engine.collectives import (
    copy_to_group,
    gather_from_shards,
    gather_partial,
    reduce_to_shards,
    reduce_to_whole,
    slice_to_shard,
    split_sizes,
)
from lightning_par.engine.initialise import seed_generators
from lightning_par.engine.stages import StageStub
from lightning_par.engine.vocabulary import VocabShardedLogits
from lightning_par.errors import PlanError
from lightning_par.layout import ModelLayout

__all__ = [
    "TensorParallel",
    "apply_tensor_parallel",
    "local_parameters",
    "placement_of",
    "shard_parameter",
]

_SEQUENCE_DIM = 1


@register_sharding(torch.ops.aten._is_any_true.default)  # type: ignore[untyped-decorator]
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Context:
    group: dist.ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Make the input of sharded weights whole."""
        if self.sequence_parallel:
            return gather_partial(x, _SEQUENCE_DIM, self.group)
        return copy_to_group(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the partial output of sharded weights."""
        if self.sequence_parallel:
            return reduce_to_shards(x, _SEQUENCE_DIM, self.group)
        return reduce_to_whole(x, self.group)


def apply_tensor_parallel(
    model: nn.Module, layout: ModelLayout, mesh: DeviceMesh, *, sequence_parallel: bool
) -> TensorParallel:
    """Make every module with a style compute its share; parameters are sharded later, by
    `shard_parameter`.

    Args:
        model: Parameters may be on meta. Modules of other pipeline stages may be missing.
        layout: The resolved plan.
        mesh: The 1-D ``tp`` axis.
        sequence_parallel: Shard the activations between the modules along T (dim 1).

    Returns:
        How each parameter is placed.

    Raises:
        PlanError: A module has an option that its style cannot keep.
    """
    group = mesh.get_group()
    context = _Context(group=group, sequence_parallel=sequence_parallel)
    placements: dict[str, Placement] = {}
    partial_names: set[str] = set()
    modules = {n: m for n, m in model.named_modules() if not isinstance(m, StageStub)}
    for fqn, style in layout.styles.items():
        if fqn not in modules:
            continue
        module = modules[fqn]
        _wrap_forward(module, _STYLES[style], context)
        for name, _ in module.named_parameters(recurse=False):
            placements[f"{fqn}.{name}"] = placement_of(style, name)
        if style in _PARTIAL_ALWAYS or (sequence_parallel and style in _PARTIAL_WITH_SEQUENCE):
            partial_names |= {f"{fqn}.{n}" for n, _ in module.named_parameters(recurse=False)}
        if style == "rowwise" and sequence_parallel:
            partial_names.add(f"{fqn}.bias")
    for fqn, names in layout.divided.items():
        for name in names if fqn in modules else ():
            setattr(modules[fqn], name, getattr(modules[fqn], name) // group.size())
    if sequence_parallel:
        for fqn in layout.block_names:
            if fqn in modules and _draws_random_numbers(modules[fqn]):
                _separate_random_numbers(modules[fqn], group.rank())
    named = dict(model.named_parameters(remove_duplicate=False))
    return TensorParallel(
        mesh=mesh,
        placements={name: placements.get(name, Replicate()) for name in named},
        partial=frozenset(partial_names & set(named)),
    )


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


def placement_of(style: str, name: str) -> Placement:
    """Return how a parameter is placed on the ``tp`` axis.

    Args:
        style: Of its module.
        name: Of the parameter in the module.
    """
    if style in ("colwise", "colwise_gather_output", "vocab_head", "vocab_embedding"):
        return Shard(0)
    if style in ("expert_colwise", "expert_rowwise"):
        return Shard(1 if style == "expert_colwise" else 2)
    return Shard(1) if style == "rowwise" and name == "weight" else Replicate()


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
_Style = Callable[[nn.Module, _Forward, _Context, tuple[Any, ...], dict[str, Any]], Any]


def _wrap_forward(module: nn.Module, style: _Style, context: _Context) -> None:
    original = module.forward
    direct = next(module.parameters(recurse=False), None) is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not direct:
            return style(module, original, context, args, kwargs)
        with local_parameters(module):
            return style(module, original, context, args, kwargs)

    module.forward = forward


def _plain(module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _colwise_gather_output(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    size = int(module.out_features)  # type: ignore[arg-type]
    return gather_from_shards(call(*args, **kwargs), -1, ctx.group, size)


def _rowwise(module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any) -> Any:
    bias = module._parameters.get("bias")
    _swap(module, "bias", None)
    try:
        out = call(*args, **kwargs)
    finally:
        _swap(module, "bias", bias)
    out = ctx.leave(out)
    return out if bias is None else out + bias


def _vocab_embedding(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    if getattr(module, "padding_idx", None) is not None or getattr(module, "max_norm", None):
        raise PlanError(
            "vocab_embedding: an embedding with padding_idx or max_norm stays 'replicated'."
        )
    (ids,) = args or tuple(kwargs.values())
    weight = module._parameters["weight"]
    assert weight is not None
    sizes = split_sizes(int(module.num_embeddings), ctx.group.size())  # type: ignore[arg-type]
    start = sum(sizes[: ctx.group.rank()])
    inside = (ids >= start) & (ids < start + weight.shape[0])
    out = call(torch.where(inside, ids - start, 0))
    return ctx.leave(torch.where(inside.unsqueeze(-1), out, 0))


def _vocab_head(module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    size = int(module.out_features)  # type: ignore[arg-type]
    return VocabShardedLogits.wrap(call(*args, **kwargs), size, ctx.group)


def _gather_sequence(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    args, kwargs = _on_first_tensor(ctx.enter, args, kwargs)
    return call(*args, **kwargs)


def _split_sequence(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    out = call(*args, **kwargs)
    return slice_to_shard(out, _SEQUENCE_DIM, ctx.group) if ctx.sequence_parallel else out


def _whole_sequence(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    def whole(x: Tensor) -> Tensor:
        size = x.shape[_SEQUENCE_DIM] * ctx.group.size()
        return gather_from_shards(x, _SEQUENCE_DIM, ctx.group, size)

    if ctx.sequence_parallel:
        args, kwargs = _on_first_tensor(whole, args, kwargs)
    return call(*args, **kwargs)


def _sequence_gather_output(
    module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any
) -> Any:
    out = call(*args, **kwargs)
    if not ctx.sequence_parallel:
        return out
    return gather_from_shards(out, _SEQUENCE_DIM, ctx.group, out.shape[1] * ctx.group.size())


def _experts(module: nn.Module, call: _Forward, ctx: _Context, args: Any, kwargs: Any) -> Any:
    """Every rank gives a part of each answer; so the gradient of an answer's weight is partial."""
    hidden, weights, *rest = args
    weights = copy_to_group(weights, ctx.group)
    mixed, other = call(ctx.enter(hidden), weights, *rest, **kwargs)
    return ctx.leave(mixed), other


_STYLES: Mapping[str, _Style] = {
    "colwise": _plain,
    "colwise_gather_output": _colwise_gather_output,
    "expert_colwise": _plain,
    "expert_rowwise": _plain,
    "experts": _experts,
    "gather_sequence": _gather_sequence,
    "replicated": _plain,
    "replicated_with_grad_allreduce": _plain,
    "rowwise": _rowwise,
    "sequence_gather_output": _sequence_gather_output,
    "sequence_parallel": _plain,
    "split_sequence": _split_sequence,
    "vocab_embedding": _vocab_embedding,
    "vocab_head": _vocab_head,
    "whole_sequence": _whole_sequence,
}
_PARTIAL_ALWAYS = ("replicated_with_grad_allreduce",)
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
