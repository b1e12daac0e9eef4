"""Wrapping the forward of blocks: split backward, activation recomputation, compilation."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_par.engine.activations.checkpointing import (
    choose_modes,
    Mode,
    Recomputation,
    recompute,
    wait_on_host,
)
from lightning_par.engine.activations.weight_casts import cast_again
from lightning_par.engine.pipeline.schedules import splits_backward
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.engine.pipeline.split_backward import defer_weight_gradients, WeightGradients
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import match_pattern
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.compiled_blocks import compile_blocks
from lightning_par.upstream.lightning import trainer_of

__all__ = ["check_recomputation", "offload_blocks", "prepare_blocks", "recompute_blocks"]


def prepare_blocks(
    module: nn.Module,
    resolved: ResolvedPlan,
    bounds: Sequence[tuple[int, int]],
    rank_of_stage: Sequence[int],
    mesh: ParallelMesh,
    options: MeshOptions,
) -> WeightGradients:
    """Wrap the blocks of this rank; hooks of sharding and of the pipeline stay outside.

    Args:
        module: Module with stubs for the blocks of other stages.
        resolved: Resolved plan of the whole model.
        bounds: First and one-past-last block of every pipeline stage.
        rank_of_stage: The pipeline rank that holds each stage.
        mesh: Mesh of this run.
        options: The options of the strategy.

    Returns:
        Where deferred gradients of weights wait; unused unless the schedule splits the backward.
    """
    weight_gradients = WeightGradients()
    compiles = options.compile_blocks is not False
    ranks = max(rank_of_stage) + 1
    # Compiled, a backward is one graph, of which no part can be put off.
    if ranks > 1 and not compiles and splits_backward(options.schedule, ranks):
        _defer(module, resolved, weight_gradients)
    # Recomputation is inside of what is compiled, so that the compiler sees both forwards; the
    # wait for tensors on the host is outside, as it is no operation of torch.
    what = options.recomputation
    if what is not None:
        modes = _stage_modes(what, bounds, rank_of_stage, options)
        recompute_blocks(module, resolved, what, bounds, modes, compiled=compiles)
    if compiles:
        compile_blocks(module, resolved, mesh, options)
    elif isinstance(module, pl.LightningModule):
        _keep_fewer_casts(module, resolved, mesh, options)
    if what is not None:
        # A compiled block saves its tensors when it runs, and not where its code says so.
        offload_blocks(module, resolved, what)
    return weight_gradients


def _keep_fewer_casts(
    module: pl.LightningModule, resolved: ResolvedPlan, mesh: ParallelMesh, options: MeshOptions
) -> None:
    """Let the blocks of this rank save fewer casts in mixed precision."""
    if not isinstance(getattr(trainer_of(module), "precision_plugin", None), MixedPrecision):
        return
    # Where casts of weights would take much memory between a forward and its backward. Manual
    # steps may change weights there.
    gathers = options.zero_stage == 3 and mesh.sizes.data > 1
    weights = module.automatic_optimization and (gathers or mesh.sizes.pipeline > 1)
    for name in _block_names(module, resolved):
        # Outside of recomputation, which saves what it needs by hooks of its own.
        if not isinstance(block := module.get_submodule(name), StageStub):
            cast_again(block, mesh.device_type, weights=weights)


def _block_names(module: nn.Module, resolved: ResolvedPlan) -> tuple[str, ...]:
    """Return the blocks of the plan, or else those of the list that holds most parameters."""
    return resolved.block_names or _listed_blocks(module)


def _listed_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the entries of the list with most parameters whose entries are of one class.

    A module can be recomputed wherever it stands: unlike the blocks of a plan, these may be called
    in any order and more than once.
    """
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        entries = [*part.children()]
        kinds = {type(entry) for entry in entries}
        if not isinstance(part, nn.ModuleList | nn.Sequential) or len(entries) < 2 or not name:
            continue
        # A list of lists has no forward that could run again.
        runs = len(kinds) == 1 and kinds.pop().forward is not nn.Module.forward
        if runs and all(next(entry.parameters(), None) is not None for entry in entries):
            found[name] = sum(p.numel() for p in part.parameters())
    if not found:
        return ()
    most = max(found, key=lambda name: found[name])
    return tuple(f"{most}.{name}" for name, _ in module.get_submodule(most).named_children())


def check_recomputation(
    module: nn.Module, resolved: ResolvedPlan, what: Recomputation, num_stages: int
) -> None:
    """Raise if the recomputation that was asked for does not fit the model.

    Args:
        module: Whole module.
        resolved: Its resolved plan.
        what: Recomputation that was asked for.
        num_stages: Number of pipeline stages, 1 without a pipeline.

    Raises:
        ConfigurationError: There are no blocks, a block has none of the parts, or there is not one
            mode per stage.
    """
    problems = []
    names = _block_names(module, resolved)
    if not names:
        problems.append(
            "ActivationCheckpointing found no blocks in the model. No plan names them, and the "
            "model has no nn.ModuleList or nn.Sequential of two or more modules of the same "
            "class, each with parameters and a forward. Put the blocks into an nn.ModuleList, or "
            "return ParallelPlan(blocks=...) from parallel_plan() of the model."
        )
    if what.parts == "plan" and not resolved.plan.checkpointable:
        problems.append(
            "ActivationCheckpointing(parts='plan') recomputes the modules that "
            "ParallelPlan(checkpointable=...) names, but the plan of the model names none. Name "
            "modules there, or pass their names, as in parts=['attention']."
        )
    elif what.parts is not None and names:
        problems += _missing_parts(resolved, what, module)
    modes = what.stage_modes
    if modes not in (None, "auto") and len(modes) != num_stages:
        problems.append(
            f"ActivationCheckpointing(per_stage={list(modes)}) lists {len(modes)} modes, but "
            f"there are {num_stages} pipeline stage(s). List one mode for each stage, or use "
            "per_stage='auto'."
        )
    raise_problems(ConfigurationError, "LP608", problems)


def _missing_parts(resolved: ResolvedPlan, what: Recomputation, module: nn.Module) -> list[str]:
    name = _block_names(module, resolved)[0]
    block = module.get_submodule(name)
    if any(
        _parts_of(n, b, resolved, what) for n, b in _chosen(module, resolved, what.every).items()
    ):
        return []
    inside = [inner for inner, _ in block.named_modules() if inner]
    asked = "'plan'" if what.parts == "plan" else list(what.parts or ())
    return [
        f"ActivationCheckpointing(parts={asked}) matches no module inside the blocks. The block "
        f"{name} has the modules {', '.join(inside[:12])}. Use names of these."
    ]


def recompute_blocks(
    module: nn.Module,
    resolved: ResolvedPlan,
    what: Recomputation,
    bounds: Sequence[tuple[int, int]],
    modes: Sequence[Mode],
    *,
    compiled: bool = False,
) -> None:
    """Wrap the blocks of this rank so that they recompute activations in the backward.

    Args:
        module: Module to change in place.
        resolved: Resolved plan of the whole model.
        what: Recomputation that was asked for; its `mode` and `stage_modes` have become `modes`.
        bounds: First and one-past-last block of every stage; one stage where no plan names blocks.
        modes: Mode of every stage.
        compiled: Whether the blocks will be compiled.
    """
    blocks, names = _chosen(module, resolved, what.every), _block_names(module, resolved)
    if not resolved.block_names:
        bounds = [(0, len(names))]
        within = names[0].rpartition(".")[0]
        rank_zero_info(
            f"The plan names no blocks, so activations of the entries of {within} are recomputed."
        )
    for (low, high), mode in zip(bounds, modes, strict=True):
        # A block is in the whole model's numbering, whichever stages this rank holds.
        for name in names[low:high]:
            if name not in blocks:
                continue
            if mode == "selective" and what.parts is not None:
                for part in _parts_of(name, blocks[name], resolved, what):
                    recompute(part, "full")
                continue
            # Compiled, the outputs that are kept are saved like everything else.
            away = what.on_host and not compiled
            recompute(blocks[name], mode, operations=what.operations, on_host=away)


def offload_blocks(module: nn.Module, resolved: ResolvedPlan, what: Recomputation) -> None:
    """Offload what the recomputed blocks of this rank keep, if that was asked for.

    Args:
        module: Changed in place.
        resolved: Resolved plan of the whole model.
        what: Recomputation that was asked for.
    """
    if what.on_host:
        for block in _chosen(module, resolved, what.every).values():
            wait_on_host(block)


def _chosen(module: nn.Module, resolved: ResolvedPlan, every: int) -> dict[str, nn.Module]:
    """Return every `every`-th block that this rank holds, by name."""
    # Every `every`-th of the whole model, so that any layout recomputes the same blocks.
    blocks = {name: module.get_submodule(name) for name in _block_names(module, resolved)[::every]}
    return {name: b for name, b in blocks.items() if not isinstance(b, StageStub)}


def _parts_of(
    name: str, block: nn.Module, resolved: ResolvedPlan, what: Recomputation
) -> list[nn.Module]:
    """Return the outermost modules inside a block that `what.parts` matches."""
    assert what.parts is not None
    prefix, patterns = f"{name}.", resolved.plan.checkpointable
    if what.parts != "plan":
        prefix, patterns = "", what.parts
    found: dict[str, nn.Module] = {}
    for inner, part in block.named_modules():
        # named_modules gives a parent before its children.
        inside = any(inner.startswith(f"{outer}.") for outer in found)
        if inner and not inside and any(match_pattern(p, prefix + inner) for p in patterns):
            found[inner] = part
    return list(found.values())


def _stage_modes(
    what: Recomputation,
    bounds: Sequence[tuple[int, int]],
    rank_of_stage: Sequence[int],
    options: MeshOptions,
) -> list[Mode]:
    """Return the mode of every stage; the stages of one rank share their rank's under "auto"."""
    if isinstance(what.stage_modes, tuple):
        return list(what.stage_modes)
    if what.stage_modes is None or len(rank_of_stage) < 2:
        return [what.mode] * len(bounds)
    ranks = max(rank_of_stage) + 1
    schedule = options.build_schedule(ranks, options.microbatches(ranks))
    blocks = [0] * ranks
    for rank, (low, high) in zip(rank_of_stage, bounds, strict=True):
        # The multiples of `every` in [low, high): ceil(high / every) - ceil(low / every).
        blocks[rank] += len(range(-(-low // what.every), -(-high // what.every)))
    # A rank that holds more micro-batches at its peak has to recompute more of its blocks.
    peaks = simulate(schedule).peak_per_rank
    modes = choose_modes(peaks, blocks, what.mode)
    return [modes[rank] for rank in rank_of_stage]


def _defer(module: nn.Module, resolved: ResolvedPlan, weight_gradients: WeightGradients) -> None:
    """Defer gradients of weights in the blocks, and in what runs after them."""
    last = [name for name, place in resolved.units.items() if place == "last"]
    modules = dict(module.named_modules())
    for name in (*resolved.block_names, *last):
        if name in modules and not isinstance(modules[name], StageStub):
            defer_weight_gradients(modules[name], weight_gradients)
