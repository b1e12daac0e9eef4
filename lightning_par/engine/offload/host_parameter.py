"""A parameter's state on the host: master weight, moments, and slots for copies both ways.

Note [Stale masters]: an entry of the master is valid where it rounds to its parameter. Elsewhere
somebody has given the parameter another value since, such as a checkpoint, and the parameter wins.
torch counts the in-place changes of a tensor, so that entries are compared only after a change.

Note [One slot]: the kernel writes the new parameter over the gradient that it has read, so that one
slot of the parameter's size serves both ways.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_par.engine.master_weights import MASTER
from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.nvme import NvmeRange
from lightning_par.engine.offload.update_worker import Update
from lightning_par.errors import OffloadError
from lightning_par.upstream.dtensor import sharded_like
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["HostParameter", "PendingStates", "local_tensor"]


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard; it shares memory and version counter with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like_parameter(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Return a tensor on the host that is sharded as its parameter is.

    Args:
        parameter: The parameter, on any device.
        local: This rank's shard of the tensor, on the host.
    """
    if not isinstance(parameter, DTensor):
        return local
    return sharded_like(local, parameter)


@dataclass(eq=False)
class HostParameter:
    """A parameter whose optimizer state is on the host.

    Attributes:
        parameter: The parameter, on the device.
        master: This rank's shard of it in float32 or float64.
        mean: First moment.
        square: Second moment.
        slots: Buffers for the gradient and the new parameter, see Note [One slot]; two with a
            delayed update, none if the parameter is on the host itself.
        nvme: Range of the file that holds the states; None: they are in memory.
        step: Number of updates that were requested.
        grad: Gradient of a parameter that is on the host itself.
        total: Sum of the gradients of several batches, in the dtype of the master; None: the slot
            holds the gradient.
    """

    parameter: nn.Parameter
    master: Tensor
    mean: Tensor
    square: Tensor
    slots: Sequence[Tensor]
    nvme: NvmeRange | None = None
    step: int = 0
    grad: Tensor | None = None
    total: Tensor | None = None
    # What `_stamp` gave when parameter and master agreed last; None: never.
    _seen: tuple[int, int, int] | None = None
    _has_master: bool = False
    _count: Tensor = field(default_factory=lambda: torch.tensor(0.0, dtype=torch.float32))

    @property
    def local(self) -> Tensor:
        """This rank's shard of the parameter, on the device."""
        return local_tensor(self.parameter)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard of the gradient."""
        return self.local.numel() * self.local.element_size()

    def is_changed(self) -> bool:
        """Whether the parameter has been changed since `mark_published`."""
        return self._seen != self._stamp()

    def differs(self) -> bool:
        """Whether the parameter is not the rounded master; the host waits for the device."""
        value = self.local.detach().to("cpu")
        return not torch.equal(self.master.to(value.dtype), value)

    def changed_behind_update(self) -> OffloadError:
        """Return the refusal of a change while a delayed update was under way."""
        return OffloadError(
            "LP603",
            f"a parameter of shape {tuple(self.parameter.shape)} was changed while its delayed "
            "update was computed. Change parameters in a hook in which no update is being "
            "computed, such as on_validation_start, or use delayed_update=False.",
        )

    def mark_published(self) -> None:
        """Remember that the parameter is the rounded master now."""
        self._seen = self._stamp()

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Copy a changed parameter to the master; see Note [Stale masters]."""
        value = self.local.to("cpu")
        # A master that was made once has more digits than the parameter.
        if self._has_master:
            # Compared in the parameter's dtype: where it agrees, the master's digits are kept.
            kept = self.master.to(value.dtype) == value
            self.master.copy_(torch.where(kept, self.master, value.to(self.master.dtype)))
        else:
            self.master.copy_(value)
        self._has_master = True
        self.flush()
        self.mark_published()

    def flush(self) -> None:
        """Write changes of the states to the file, if they are in one."""
        if self.nvme is not None:
            self.nvme.flush()

    def gradient(self, slot: int) -> Tensor:
        """Return this rank's shard of the gradient, on the host.

        Args:
            slot: Index of the slot that holds it, if a slot does.
        """
        if self.grad is not None:
            return self.grad
        return self.slots[slot] if self.total is None else self.total

    def next_update(self, rule: AdamRule, slot: int) -> Update:
        """Return the next Adam step of this parameter, and count it.

        Args:
            rule: Hyperparameters of its group.
            slot: Index of the slot that holds the gradient and receives the parameter.
        """
        self.step += 1
        self._count.fill_(self.step)  # in place: the optimizer's state holds this tensor
        # A parameter on the host is written in place; else the kernel writes to the slot.
        out = self.slots[slot] if self.grad is None else self.local
        # Autograd may compute a transposed gradient; a slot and a sum are contiguous already.
        grad = self.gradient(slot).contiguous()
        tensors = AdamTensors(
            master=self.master.view(-1),
            mean=self.mean.view(-1),
            square=self.square.view(-1),
            grad=grad.view(-1),
            out=out.view(-1),
        )
        self.total = None
        return Update(rule=rule, tensors=tensors, step=self.step, nvme=self.nvme)

    def states(self) -> dict[str, Tensor]:
        """Return the states of `torch.optim.Adam`, on the host, plus the master if its dtype is
        not the parameter's; empty before the first step.
        """
        if not self.step:
            return {}
        held = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        # float32 parameters are their own master, and checkpoints stay those of torch's Adam.
        if self.parameter.dtype != self.master.dtype:
            held[MASTER] = self.master
        sharded = {name: _like_parameter(self.parameter, part) for name, part in held.items()}
        return {"step": self._count, **sharded}

    def targets(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return this rank's shards by state name, for a checkpoint to be loaded into.

        Args:
            names: States that the checkpoint holds, by name.
        """
        # Without a stored master, the first refresh makes it from the parameter.
        self._has_master = self._has_master or MASTER in names
        # Unlike any stamp, so that the next batch compares parameter and master.
        self._seen = None
        return {"exp_avg": self.mean, "exp_avg_sq": self.square, MASTER: self.master}

    def take_states(self, given: Mapping[str, Any]) -> bool:
        """Take over states that user code has put into the optimizer; return whether they differ.

        Args:
            given: What the optimizer has there now; empty: the states begin anew.
        """
        moments = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        # Past `PendingStates`, which would wait for the updates of other parameters.
        values = dict(dict.items(given)) if isinstance(given, dict) else dict(given)
        parts = {name: local_tensor(values[name]) for name in moments if values}
        step = values.get("step", 0)
        is_shown = all(parts[name].data_ptr() == moments[name].data_ptr() for name in parts)
        if is_shown and int(step) == self.step:
            return False
        for name, moment in moments.items():
            if name not in parts:
                moment.zero_()
            elif parts[name].data_ptr() != moment.data_ptr():
                moment.copy_(parts[name])
        self.flush()
        self.restore_step(step)
        return True

    def restore_step(self, step: Tensor | float) -> None:
        """Set the number of updates, as read from a checkpoint."""
        self.step = int(step)
        self._count = torch.as_tensor(step).clone()

    def _stamp(self) -> tuple[int, int, int]:
        # The address tells that `parameter.data` is another tensor, the versions in-place changes:
        # of this rank's shard, and of the DTensor around it, which a user changes.
        local = self.local
        return local.data_ptr(), count_of_changes(local), count_of_changes(self.parameter)


class PendingStates(dict[str, Any]):
    """States of a parameter whose delayed update may be under way; whoever reads them waits for it.

    Args:
        states: Name of a state -> its value.
        wait: Waits for the updates.
    """

    def __init__(self, states: Mapping[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(states)
        self._wait = wait

    @override
    def __getitem__(self, name: str) -> Any:
        self._wait()
        return super().__getitem__(name)

    @override
    def get(self, name: str, default: Any = None) -> Any:
        self._wait()
        return super().get(name, default)

    @override
    def items(self) -> Any:
        self._wait()
        return super().items()

    @override
    def values(self) -> Any:
        self._wait()
        return super().values()

    @override
    def __reduce__(self) -> Any:
        """Give a copy, or a file, the states alone."""
        return dict, (dict(self.items()),)
