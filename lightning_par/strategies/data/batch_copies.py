"""Batches on their way to a CUDA device: pinned, and copied on a stream of their own.

A batch is copied when it is needed, beside what the device was given before. One step earlier goes
a batch that already lies in the queue of its loader's pinning thread: that thread has copied it to
memory which nobody else has, so that it cannot change before its turn. Nothing is fetched earlier
for it: loaders, samplers and random numbers go as they would without.
"""

from abc import ABC
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_par.engine.offload.copy_stream import BegunCopies
from lightning_par.engine.tensor_tree import children
from lightning_par.upstream.data import pinned_batches, WorkerIterator
from lightning_par.upstream.lightning import next_of_fit, trainer_of

__all__ = ["BATCH_HOOKS", "BatchCopies", "copies_to", "has_hook"]

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's hooks that may change a batch on its way to the device."""


class BatchCopies:
    """Copies the tensors of batches, before Lightning moves what is left of them.

    Args:
        module: The user's LightningModule. If it, or its data module, overrides
            `transfer_batch_to_device`, that gets the batch as it is; if `on_before_batch_transfer`,
            which may change a batch in place, no copy begins early.
        device: A CUDA device.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module, self._copies = module, BegunCopies(device)

    def copy(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; the host does not wait.

        Args:
            batch: On the host. What has a method `to` and is no plain tensor stays as it is.
        """
        if has_hook(self._module, "transfer_batch_to_device"):
            return batch
        copied = apply_to_collection(batch, _Movable, self._take)
        # The stream of the step waits, not the host.
        self._copies.wait()
        return copied

    def begin_next(self) -> None:
        """Begin the copy of the batch that comes next in a fit, if it lies in its queue.

        To be called when the device has been given a step, and before the host waits for it.
        """
        trainer = trainer_of(self._module)
        if trainer is None or not trainer.training or self._may_change_on_the_host():
            return
        fetched, iterators = next_of_fit(trainer)
        # Only looks: what lies in the queues stays there.
        queues = [pinned_batches(i) if isinstance(i, WorkerIterator) else None for i in iterators]
        # Lightning has fetched none ahead: the next ones are the first of the queues.
        if not fetched:
            fetched = [queue[0] for queue in queues if queue]
        elif None in queues:
            return  # it may lie in memory that its dataset writes to again
        # Such a plugin makes new tensors of these, still on the host.
        converts = isinstance(trainer.precision_plugin, DoublePrecision | HalfPrecision)
        for tensor in _tensors_to_move(fetched):
            if not (converts and tensor.is_floating_point()):
                self._copies.begin(tensor)

    def _may_change_on_the_host(self) -> bool:
        hooks = "on_before_batch_transfer", "transfer_batch_to_device"
        return any(has_hook(self._module, hook) for hook in hooks)

    def _take(self, value: Any) -> Any:
        return self._copies.take(value) if isinstance(value, Tensor) else value


def copies_to(module: pl.LightningModule, device: torch.device) -> BatchCopies | None:
    """Return what copies the batches of a module to a device; None where that has no streams."""
    return BatchCopies(module, device) if device.type == "cuda" else None


def has_hook(module: pl.LightningModule, name: str) -> bool:
    """Whether a module, or the data module of its Trainer, overrides a hook for batches."""
    data = getattr(trainer_of(module), "datamodule", None)
    return is_overridden(name, module, pl.LightningModule) or (
        data is not None and is_overridden(name, data, pl.LightningDataModule)
    )


class _Movable(ABC):  # noqa: B024 - has no method to implement: it only recognizes classes
    """What Lightning moves as a whole: anything of a class that has a method `to`."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "to", None))


def _tensors_to_move(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    # Anything with a `to` of its own is moved by Lightning as a whole.
    elif not isinstance(batch, _Movable):
        for _, value in children(batch) or ():
            yield from _tensors_to_move(value)
