"""`MemoryMonitor`: what every rank holds at its peak, and of what kind it is."""

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_par.callbacks.first_step_counter import FirstStepCounter, gather_numbers
from lightning_par.engine.memory.measured import (
    bytes_held,
    current_memory,
    peak_memory,
    SavedActivations,
)
from lightning_par.upstream.lightning import is_logging_step

__all__ = ["MemoryMonitor"]

_KINDS = ("peak", "current", "parameters", "gradients", "optimizer", "activations")


class MemoryMonitor(FirstStepCounter[SavedActivations]):
    """Measures the memory of every rank.

    Logged at the Trainer's ``log_every_n_steps`` in MiB, the same on every rank. The first six are
    the largest over the ranks:

    ==========================  ===================================================================
    key                         meaning
    ==========================  ===================================================================
    ``memory/peak``             on CUDA the most bytes in tensors since the last logged step; on the
                                CPU the most that the process ever held
    ``memory/current``          the same now, at the end of the step
    ``memory/parameters``       this rank's shards of parameters and buffers
    ``memory/gradients``        of gradients, when the optimizer steps
    ``memory/optimizer``        of optimizer states
    ``memory/activations``      the most bytes saved for backwards at once, counted in the first
                                step of every batch shape; without parameters and what is gathered
    ``memory/rank_r/peak``      of rank r; so for all six
    ==========================  ===================================================================

    Works with any strategy.

    Args:
        per_rank: Whether to log the values of every rank as well.

    **Communicates**: one all-gather of six numbers at every logged step.
    """

    def __init__(self, *, per_rank: bool = True) -> None:
        super().__init__()
        self.per_rank = per_rank
        self._gradients = 0

    @override
    def counter(self) -> AbstractContextManager[SavedActivations]:
        return SavedActivations()

    @override
    def on_before_optimizer_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._stop()
        self._gradients = bytes_held([p.grad for p in pl_module.parameters()])

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._stop()
        if not is_logging_step(trainer):
            return
        device = trainer.strategy.root_device
        states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
        held = (
            peak_memory(device),
            current_memory(device),
            bytes_held([list(pl_module.parameters()), list(pl_module.buffers())]),
            self._gradients,
            bytes_held(states),
            self.counted.peak,
        )
        found = gather_numbers([size / 2**20 for size in held], device)
        values = dict(zip(_KINDS, found.amax(0).tolist(), strict=True))
        if self.per_rank:
            for rank, row in enumerate(found.tolist()):
                pairs = zip(_KINDS, row, strict=True)
                values |= {f"rank_{rank}/{name}": value for name, value in pairs}
        logged = {f"memory/{name}": value for name, value in values.items()}
        pl_module.log_dict(logged, on_step=True, on_epoch=False, batch_size=1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
