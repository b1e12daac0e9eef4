"""The engine of autograd, and the gradient scaler."""

import torch
from torch.amp import GradScaler

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    _graph_task = torch._C._current_graph_task_id
    _UNSCALE = GradScaler._unscale_grads_

__all__ = ["OverridableGradScaler", "is_in_backward", "scaler_device"]


def is_in_backward() -> bool:
    """Whether this thread runs a backward, as a recomputed forward does.

    A hook could only tell of the tensors that it is on. Torch's own checkpointing asks the same.
    """
    return _graph_task() != -1


class OverridableGradScaler(GradScaler):
    """A `GradScaler` whose subclasses may override `_unscale_grads_`.

    It divides the gradients of an optimizer and returns, for each device, whether one of them is
    not finite. Torch's sharded scaler of FSDP1 overrides it as well; nothing public stands between
    `unscale_`, which also does the accounting, and the gradients. Without this look-up a torch that
    renames it would never call the override.
    """


def scaler_device(scaler: GradScaler) -> str:
    """Return the type of the devices that a scaler was made for; its `state_dict` leaves it out."""
    with names_of("torch"):
        return scaler._device
