"""Tensor parallelism: weights are DTensor shards, modules compute on them locally.

Shapes: B batch, T tokens, D model dim, N heads; a rank holds D/tp features or T/tp tokens.

Note [Local computation]: parameters are DTensors, so that optimizers, norms and checkpoints know
what they hold; inside a module's forward they stand for their local shards, and the collectives are
explicit. No operation of the model is dispatched through DTensor. With sequence parallelism the
activations between the modules are shards along T, and the pair all-reduce + identity becomes
all-gather + reduce-scatter, which moves the same bytes.

**Source**: Shoeybi et al. 1909.08053; Korthikanti et al. 2205.05198, section 4.2.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from lightning_par.engine.pipeline.stage import StageStub, TokenCount
from lightning_par.engine.rng import fork_torch_rng, own_draws, seed_generators
from lightning_par.engine.tensor.huggingface_layers import enter_region, leave_region
from lightning_par.engine.tensor.parameters import tensor_placements
from lightning_par.engine.tensor.sequence_parallel import Region, Regions
from lightning_par.engine.tensor.styles import apply_style
from lightning_par.engine.tensor.whole_parameters import read_whole_parameters
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES

__all__ = ["TensorParallel", "apply_tensor_parallel"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallel:
    """What tensor parallelism means for the parameters of one model.

    Attributes:
        mesh: The ``tp`` axis.
        placements: FQN of a parameter -> how it is placed on the axis; every parameter is listed.
        partial: FQNs of whole parameters of which each rank computes a part of the gradient.
        tokens: T of the activations that are shards along T; None: none are.
    """

    mesh: DeviceMesh
    placements: Mapping[str, Placement]
    partial: frozenset[str]
    tokens: TokenCount | None


def _shard_between_blocks(
    modules: Mapping[str, nn.Module], block_names: Sequence[str], region: Region
) -> None:
    """Cut the input of the first block of a container along T, and make the output of the last one
    whole.
    """
    # groupby joins neighbors: blocks of one container are listed together, in their order.
    for _, group in groupby(block_names, lambda fqn: fqn.rpartition(".")[0]):
        names = list(group)
        for fqn, style in ((names[0], enter_region), (names[-1], leave_region)):
            # On another pipeline stage: that rank cuts, or gathers, there.
            if fqn in modules:
                apply_style(modules[fqn], style, region)


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
    # The plan knows a model whose code between the blocks needs whole sequences.
    sequence_parallel = sequence_parallel and resolved.plan.sequence_region != "none"
    regions = Regions(resolved, group, sequence_parallel=sequence_parallel)
    partial_names: set[str] = set()
    modules = {n: m for n, m in model.named_modules() if not isinstance(m, StageStub)}
    for fqn, style in resolved.styles.items():
        if fqn not in modules:
            continue
        module, region = modules[fqn], regions.of(fqn)
        apply_style(module, style, region)
        spec = TENSOR_STYLES[style]
        # Under sequence parallelism a rank sees T/tp tokens: whole weights get a part of the
        # gradient.
        sums = ("always", "sequence_parallel") if region.sequence_parallel else ("always",)
        if spec.partial_gradients in sums:
            own = (name for name, _ in module.named_parameters(recurse=False))
            partial_names |= {f"{fqn}.{n}" for n in own if spec.sharded_dim(n) is None}
    for fqn, names in resolved.divided.items():
        for name in names if fqn in modules else ():
            # `self.num_heads // tp`: the forward reshapes by it, and each rank has its own heads.
            setattr(modules[fqn], name, getattr(modules[fqn], name) // group.size())
    # Without it every rank computes the same between the sharded layers, and has to draw alike.
    if sequence_parallel:
        for fqn in resolved.block_names:
            if fqn in modules and _draws_random_numbers(modules[fqn]):
                _separate_random_numbers(modules[fqn], group.rank())
    if sequence_parallel and resolved.plan.sequence_region == "blocks":
        _shard_between_blocks(modules, resolved.block_names, regions.sharded)
    # After the styles, which say what is sharded; names of ties are joined here.
    placements = tensor_placements(model, resolved)
    if not sequence_parallel:
        read_whole_parameters(model, resolved, placements)
    return TensorParallel(
        mesh=mesh,
        placements=placements,
        partial=frozenset(partial_names & set(placements)),
        tokens=regions.sharded.tokens if sequence_parallel else None,
    )


def _draws_random_numbers(block: nn.Module) -> bool:
    rates = [getattr(m, name, 0) for m in block.modules() for name in ("p", "dropout", "dropout_p")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _separate_random_numbers(block: nn.Module, tp_rank: int) -> None:
    """Draw other random numbers on every rank inside the block: each holds other tokens, then other
    heads.

    The seed comes from the state that all ranks share, which moves on alike, and is restored
    afterwards.
    """

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not block.training:
                return inner(*args, **kwargs)
            with own_draws():
                # All ranks draw the same number, and each adds its place.
                seed = int(torch.randint(2**62, ())) + tp_rank
            device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
            # The state outside has moved on by one draw, on all ranks alike.
            with fork_torch_rng(device):
                seed_generators(seed, device)
                return inner(*args, **kwargs)

        return forward

    wrap_forward(block, around, "separate_random_numbers")
