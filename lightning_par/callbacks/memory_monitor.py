"""`MemoryMonitor`: memory of every rank: peak, parameters, gradients, states, activations."""

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
    """Monitor of the memory of every rank, by kind.

    Logged at the Trainer's ``log_every_n_steps`` in MiB, the same on every rank. The first six are
    the maximum over the ranks:

    - ``memory/peak``: peak memory: on CUDA allocated bytes since the last logged step, on the CPU
      the process's highest resident set size so far
    - ``memory/current``: the same at the end of the step
    - ``memory/parameters``: local shards of parameters and buffers
    - ``memory/gradients``: local gradients, right before the optimizer step
    - ``memory/optimizer``: local optimizer states
    - ``memory/activations``: peak of the tensors saved for the backward, counted in the first step
      of every batch shape; without parameters and gathered shards
    - ``memory/rank_r/peak``: value of rank r; likewise for all six

    Works with any strategy.

    Args:
        per_rank: Whether to log the values of every rank as well.

    **Communicates**: one all-gather of six numbers at every logged step.

    Examples:
        >>> trainer = L.Trainer(callbacks=[MemoryMonitor(per_rank=False)])
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
        self._stop_counting()
        # Measured here, since the optimizer step is followed by zero_grad.
        self._gradients = bytes_held([p.grad for p in pl_module.parameters()])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self._stop_counting()
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
        # batch_size: otherwise Lightning would search the batch for it.
        pl_module.log_dict(logged, on_step=True, on_epoch=False, batch_size=1)
        if device.type == "cuda":
            # The next peak is that of the steps until then, not of the run.
            torch.cuda.reset_peak_memory_stats(device)
