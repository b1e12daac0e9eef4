"""The engine of autograd, and the gradient scaler."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp import GradScaler

from lightning_par.upstream.functions import replaced
from lightning_par.upstream.presence import names_of

with names_of("torch"):
    _graph_task = torch._C._current_graph_task_id
    _saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _RUN_BACKWARD = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    _UNSCALE = GradScaler._unscale_grads_

__all__ = ["OverridableGradScaler", "backward_inside", "is_in_backward", "saved_tensor_hooks"]


def is_in_backward() -> bool:
    """Whether this thread runs a backward, as a recomputed forward does.

    A hook could only tell of the tensors that it is on. Torch's own checkpointing asks the same.
    """
    return _graph_task() != -1


def saved_tensor_hooks() -> Any:
    """Return the innermost pair of `torch.autograd.graph.saved_tensors_hooks` that is open here.

    Code that a checkpoint runs, and runs again, has those of the checkpoint; only how to open such
    hooks is public.
    """
    return _saved_tensor_hooks(False)


def backward_inside(mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
    """Inside, what a backward calls, as recomputed forwards, sees a `TorchFunctionMode`.

    ``backward`` is itself a function that the mode gets, with the mode put aside; the engine takes
    over the modes that are active where it starts, which is there.

    Args:
        mode: Entered whenever the engine starts.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return _RUN_BACKWARD(*args, **kwargs)

    return replaced(torch.autograd, "_engine_run_backward", run)


class OverridableGradScaler(GradScaler):
    """A `GradScaler` whose subclasses may override `_unscale_grads_`.

    It divides the gradients of an optimizer and returns, for each device, whether one of them is
    not finite. Torch's sharded scaler of FSDP1 overrides it as well; nothing public stands between
    `unscale_`, which also does the accounting, and the gradients. Without this look-up a torch that
    renames it would never call the override.
    """
