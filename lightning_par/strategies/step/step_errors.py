"""Errors of a step, told in terms of the plan: a plain tensor that meets a sharded weight,
gradients inside of a step that a pipeline cuts, what a block of another stage leaves on itself.
"""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, TracebackType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_par.engine.pipeline.side_effects import explain_absent
from lightning_par.engine.tensor.whole_parameters import (
    BLOCK_CALLS,
    explain_shards,
    failing_module,
    holds_tensor_shards,
)
from lightning_par.errors import ConfigurationError, LightningParError, PlanError
from lightning_par.strategies.step.absent_parameter import is_of_a_framework

__all__ = ["explain_mixing", "raise_explained"]

_MIXED = re.compile(r"(aten\.\w+)\S* got mixed torch\.Tensor and DTensor")
_NEEDS_GRADIENT = re.compile(
    r"register a hook on a tensor that doesn't|can't retain_grad on Tensor"
)


def raise_explained(
    module: nn.Module, error: Exception, refuse: Callable[[LightningParError], bool] | None
) -> None:
    """Raise what to do about an error of torch in a step, or the error itself.

    Args:
        module: The user's LightningModule.
        error: What its step raised, which is being handled.
        refuse: Under a pipeline: notes an error for all ranks, on which nothing may have failed,
            and returns whether that was done; then nothing is raised.
    """
    if isinstance(error, LightningParError):
        raise error
    told: LightningParError | None
    told = explain_mixing(module, error) or explain_shards(module, error)
    if told is None and refuse is not None:
        told = explain_absent(module, error, _names_read(error)) or _explain_gradients(error)
        if told is not None and refuse(told):
            return
    if told is None:
        raise error
    raise told from error


def _names_read(error: Exception) -> set[str]:
    """Return the names of attributes and globals in the innermost function of the user's that an
    error passed, with those of the comprehensions in it.
    """
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The innermost of the user's functions; torch and Lightning call through it.
    codes = [code for code in frames if not is_of_a_framework(code.co_filename)][-1:]
    read = set[str]()
    while codes:
        code = codes.pop()
        read.update(code.co_names)
        # Lambdas and, before Python 3.12, comprehensions are code objects of their own.
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return read


def _explain_gradients(error: Exception) -> ConfigurationError | None:
    """Return what to do about a step under a pipeline that asks for gradients by itself, or that
    needs them where the step is only looked at.

    Args:
        error: What code of the user raised.

    Returns:
        None if the error is about something else.
    """
    if _NEEDS_GRADIENT.search(str(error)) and not torch.is_grad_enabled():
        return ConfigurationError(
            "LP411",
            "training_step registers a hook on a tensor, or calls retain_grad() on it. Before the "
            "first step of a pipeline, training_step runs once on a few samples without "
            f"gradients, where torch refuses that: {error} Write `if tensor.requires_grad:` "
            "before that call.",
        )
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = Path("torch", "autograd", "__init__.py").parts
    # Torch's own engine in the traceback means that the step asked for gradients.
    if not any(Path(code.co_filename).parts[-3:] == inside for code in frames):
        return None
    return ConfigurationError(
        "LP411",
        "training_step asks for gradients by itself (torch.autograd.grad or backward). Under a "
        "pipeline the autograd graph of a rank contains only its own stage, so these gradients "
        "cannot be computed through the other stages. Use pipeline_parallel_size=1. The error of "
        f"torch was: {error}",
    )


def explain_mixing(module: nn.Module, error: Exception) -> PlanError | None:
    """Return which module mixes the two, and what to do; None if torch says something else.

    Args:
        module: The user's LightningModule.
        error: What code of the user raised.
    """
    found = _MIXED.search(str(error))
    return (
        None
        if found is None
        else PlanError("LP208", _mixed_text(module, found[1], error.__traceback__))
    )


def _mixed_text(module: nn.Module, operation: str, trace: TracebackType | None) -> str:
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if not is_of_a_framework(frame.f_code.co_filename)
    ]
    at = f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
    name, owner = failing_module(module, trace)
    sharded = [n for n, p in owner.named_parameters(recurse=False) if isinstance(p, DTensor)]
    weights = f" ({', '.join(sharded)})" if sharded else ""
    if not holds_tensor_shards(module):
        cure = BLOCK_CALLS
    elif sharded:
        cure = (
            "If this code runs in a forward, give the module that holds the weight a style in "
            f"ParallelPlan(tensor={{{name!r}: ...}}): 'replicated' if every rank computes the "
            "same, 'sequence_parallel' if a rank computes its own tokens, "
            "'replicated_with_grad_allreduce' if a rank computes its own heads or features"
        )
    else:
        cure = (
            "If code of another module reads this weight, use sequence_parallel=False, and give "
            "the module that holds the weight the style 'replicated' in ParallelPlan(tensor=...), "
            "which does not shard it"
        )
    return (
        f"{name or type(module).__name__}: {operation}{at} combines a plain tensor with a "
        f"weight{weights} that tensor or data parallelism has sharded (a DTensor). {cure}. If "
        "this code runs in a hook, use trainer.strategy.full_parameter(name), or "
        "parameter.full_tensor()."
    )
