"""A plain tensor that meets a sharded weight: torch's error, told in terms of the plan."""

import re
import traceback
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_par.engine.tensor.whole_parameters import failing_module
from lightning_par.errors import PlanError
from lightning_par.strategies.step.absent_parameter import is_of_a_framework

__all__ = ["explain_mixing"]

_MIXED = re.compile(r"(aten\.\w+)\S* got mixed torch\.Tensor and DTensor")


def explain_mixing(module: nn.Module, error: RuntimeError) -> PlanError | None:
    """Return which module mixes the two, and what to do; None if torch says something else.

    Args:
        module: The user's LightningModule.
        error: What code of the user raised.
    """
    found = _MIXED.search(str(error))
    return None if found is None else PlanError(_explain(module, found[1], error.__traceback__))


def _explain(module: nn.Module, operation: str, trace: TracebackType | None) -> str:
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if not is_of_a_framework(frame.f_code.co_filename)
    ]
    at = f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
    name, owner = failing_module(module, trace)
    sharded = [n for n, p in owner.named_parameters(recurse=False) if isinstance(p, DTensor)]
    weights = f" ({', '.join(sharded)})" if sharded else ""
    return (
        f"{name or type(module).__name__}: {operation}{at} mixes a plain tensor with a weight"
        f"{weights} that tensor or data parallelism holds as a DTensor. Where it computes in a "
        f"forward, give the module that holds the weight a style in ParallelPlan(tensor="
        f"{{{name!r}: ...}}): 'replicated' if every rank computes alike, 'sequence_parallel' on "
        "each rank's tokens, 'replicated_with_grad_allreduce' on its heads or features. In a hook "
        "use trainer.strategy.full_parameter(name), or parameter.full_tensor()."
    )
