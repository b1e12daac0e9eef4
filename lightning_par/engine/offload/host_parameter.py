"""The host's part of a parameter: its master, its moments, and where gradient and parameter cross.

Note [Whose value counts]: the master is valid where it rounds to its parameter. Elsewhere somebody
has given the parameter another value since, such as a checkpoint, and the parameter counts. Torch
counts the changes of a tensor, so that this is looked at only after a change.

Note [One slot]: the kernel writes the new parameter over the gradient that it has read, so that one
slot of the parameter's size serves both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.master_weights import MASTER
from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.nvme import NvmeRange
from lightning_par.engine.offload.update_worker import Update
from lightning_par.upstream.dtensor import sharded_like
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["HostParameter", "like_parameter", "local_tensor", "wide_dtype"]


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory and count of changes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of a parameter."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def like_parameter(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Return a tensor on the host that is divided among ranks as its parameter is.

    Args:
        parameter: On any device.
        local: This rank's part, on the host.
    """
    if not isinstance(parameter, DTensor):
        return local
    return sharded_like(local, parameter)


@dataclass(eq=False)
class HostParameter:
    """A parameter whose optimizer state is on the host.

    Attributes:
        parameter: On the device.
        master: This rank's part in the wide dtype.
        mean: Of the gradients.
        square: Mean of their squares.
        slots: Where gradients arrive and parameters leave; see Note [One slot]. Empty if the
            parameter is on the host itself.
        pages: Where the states are, if that is a file.
        step: How many updates were asked for.
        grad: Of a parameter that is on the host itself.
        total: Gradient of several batches, in the dtype of the master; None: the slot holds all.
    """

    parameter: nn.Parameter
    master: Tensor
    mean: Tensor
    square: Tensor
    slots: Sequence[Tensor]
    pages: NvmeRange | None = None
    step: int = 0
    grad: Tensor | None = None
    total: Tensor | None = None
    _seen: tuple[int, int] | None = None
    _has_master: bool = False
    _count: Tensor = field(default_factory=lambda: torch.tensor(0.0, dtype=torch.float32))

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, on the device."""
        return local_tensor(self.parameter)

    @property
    def nbytes(self) -> int:
        """Of the gradient."""
        return self.local.numel() * self.local.element_size()

    def is_changed(self) -> bool:
        """Whether the parameter has been changed since `published`."""
        return self._seen != self._stamp()

    def published(self) -> None:
        """Take note that the parameter is the rounded master now."""
        self._seen = self._stamp()

    @torch.no_grad()
    def follow(self) -> None:
        """Let the master follow a change of the parameter; see Note [Whose value counts]."""
        value = self.local.to("cpu")
        if self._has_master:
            kept = self.master.to(value.dtype) == value
            self.master.copy_(torch.where(kept, self.master, value.to(self.master.dtype)))
        else:
            self.master.copy_(value)
        self._has_master = True
        self.flush()
        self.published()

    def flush(self) -> None:
        """Let the file have what was written into the states here."""
        if self.pages is not None:
            self.pages.flush()

    def arrived(self, slot: int) -> Tensor:
        """Return this rank's part of the gradient, on the host.

        Args:
            slot: Which one holds it, if one does.
        """
        if self.grad is not None:
            return self.grad
        return self.slots[slot] if self.total is None else self.total

    def update(self, rule: AdamRule, slot: int) -> Update:
        """Return the next step of this parameter.

        Args:
            rule: Of its group.
            slot: Which one holds the gradient.
        """
        self.step += 1
        self._count.fill_(self.step)
        out = self.slots[slot] if self.grad is None else self.local
        grad = self.arrived(slot).contiguous()
        tensors = AdamTensors(
            master=self.master.view(-1),
            mean=self.mean.view(-1),
            square=self.square.view(-1),
            grad=grad.view(-1),
            out=out.view(-1),
        )
        self.total = None
        return Update(rule=rule, tensors=tensors, step=self.step, pages=self.pages)

    def states(self) -> dict[str, Tensor]:
        """Return what `torch.optim.Adam` would hold, on the host, and the master if it is more
        than the parameter; empty before the first step.
        """
        if not self.step:
            return {}
        held = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        if self.parameter.dtype != self.master.dtype:
            held[MASTER] = self.master
        divided = {name: like_parameter(self.parameter, part) for name, part in held.items()}
        return {"step": self._count, **divided}

    def targets(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return where the states of a checkpoint go, each this rank's part.

        Args:
            names: Of the states that are stored.
        """
        self._has_master = self._has_master or MASTER in names
        self._seen = None
        return {"exp_avg": self.mean, "exp_avg_sq": self.square, MASTER: self.master}

    def resume(self, step: Tensor | float) -> None:
        """Go on after a number of steps."""
        self.step = int(step)
        self._count = torch.as_tensor(step).clone()

    def _stamp(self) -> tuple[int, int]:
        local = self.local
        return local.data_ptr(), count_of_changes(local)
