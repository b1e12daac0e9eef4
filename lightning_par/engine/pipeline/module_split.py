"""Split of a model into pipeline stages: stubs take the place of what a rank does not hold.

Note [Several stages on a rank]: the model then rests with all that the rank holds in place, for
optimizers, sharding and checkpoints. While a stage is at work, it sees its own blocks only: stubs
stand for the others, those of the rank's other stages too (`Stage.slots`).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from lightning_par.engine.pipeline.captured_outputs import captured_names, keep_outputs
from lightning_par.engine.pipeline.side_effects import watch_side_effects
from lightning_par.engine.pipeline.stage import (
    AbsentModule,
    check_last_block,
    earlier_block,
    GhostModule,
    LaterBlock,
    poison,
    Stage,
)
from lightning_par.plan.resolved_plan import ResolvedPlan

__all__ = ["cut_stages"]


def cut_stages(
    model: nn.Module,
    resolved: ResolvedPlan,
    indices: Sequence[int],
    bounds: Sequence[tuple[int, int]],
) -> tuple[Stage, ...]:
    """Remove from `model` what other ranks hold and put stubs in its place.

    Args:
        model: Parameters may be on meta; changed in place.
        resolved: The resolved plan.
        indices: The stages of this rank.
        bounds: First and one-past-last block of every stage of the pipeline.

    Returns:
        The stages, to be given to the executor.

    Raises:
        PipelineError: The last block of a stage has a backward hook, which would not be called.
    """
    # Known before anything is cut, so that every rank refuses alike.
    for _, end in bounds[:-1]:
        check_last_block(end - 1, model.get_submodule(resolved.block_names[end - 1]))
    captured = resolved.plan.captured
    carried = (*resolved.plan.carried, *captured_names(captured))
    watched: list[str] = []
    stages = tuple(Stage(index, bounds, carried, resolved.kept) for index in indices)
    for number, fqn in enumerate(resolved.block_names):
        block = model.get_submodule(fqn)
        owner = next((s for s in stages if s.first_block <= number < s.end_block), None)
        if owner is not None:
            keep_outputs(block, captured)
            # After the hook that keeps captured outputs, as they are part of what is recorded.
            block.register_forward_hook(partial(owner.record, number))
            watched.append(fqn)
        # What each stage of this rank sees at this place; the model rests with the real block.
        shown = [
            block if s is owner else _block_stub(block, fqn, s, number, captured) for s in stages
        ]
        _place(model, fqn, stages, shown, block if owner else shown[0])
    for fqn in resolved.units:
        held = resolved.stages_of(fqn, bounds)
        module_name, _, name = fqn.rpartition(".")
        module = model.get_submodule(module_name)
        # A parameter directly on a container, as a position embedding: NaN stands for it, as a
        # buffer that is not saved.
        if name in module._parameters:
            if held.isdisjoint(indices):
                _poison_parameter(module, name)
            continue
        unit = model.get_submodule(fqn)
        is_first = resolved.units[fqn] == "first"
        shown = [
            unit
            if stage.index in held
            else GhostModule(unit, fqn, stage)
            if is_first
            else AbsentModule(unit, fqn, stage)
            for stage in stages
        ]
        _place(model, fqn, stages, shown, shown[0] if held.isdisjoint(indices) else unit)
    for fqn in watched:
        watch_side_effects(model, fqn, carried, captured)
    return stages


def _place(
    model: nn.Module,
    fqn: str,
    stages: Sequence[Stage],
    shown: Sequence[nn.Module],
    resting: nn.Module,
) -> None:
    """Put `resting` at `fqn`, and note where a stage is to see something else."""
    owner_name, _, name = fqn.rpartition(".")
    owner = model.get_submodule(owner_name)
    owner._modules[name] = resting
    for stage, module in zip(stages, shown, strict=True):
        if module is not resting:
            stage.slots.append((owner, name, module))


def _block_stub(
    block: nn.Module, fqn: str, stage: Stage, number: int, captured: Mapping[str, int]
) -> nn.Module:
    before = number < stage.first_block
    if before:
        return earlier_block(block, fqn, stage, number, captured)
    return LaterBlock(block, fqn, stage)


def _poison_parameter(owner: nn.Module, name: str) -> None:
    parameter = owner._parameters.pop(name)
    assert parameter is not None
    # On the CPU: it is moved with the module's buffers.
    nan = poison(parameter.shape, parameter.dtype, torch.device("cpu"))
    owner.register_buffer(name, nan, persistent=False)
