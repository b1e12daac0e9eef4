"""`ThroughputMonitor`: samples, tokens and FLOPs per second, and MFU (model FLOPs utilization)."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from typing_extensions import override

from lightning_par.callbacks.first_step_counter import FirstStepCounter, gather_numbers
from lightning_par.engine.batch import batch_entry, batch_size
from lightning_par.errors import ConfigurationError
from lightning_par.observe.flops import FlopCounter
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.upstream.lightning import compute_dtype, is_logging_step

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(FirstStepCounter[FlopCounter]):
    """Monitor of the throughput of the whole mesh, averaged between two logged steps.

    FLOPs are counted by torch's formulas in the first step of every batch shape, on every rank, and
    summed; the model declares nothing. The first step, which counts, and validation are excluded
    from the time. Logged at the Trainer's ``log_every_n_steps``, the same on every rank:

    - ``throughput/samples`` (1/s): samples, summed over the replicas
    - ``throughput/tokens`` (1/s): tokens, summed over the replicas; only if the plan names sequence
      dims, or `tokens` is given
    - ``throughput/step`` (ms): mean time of a batch
    - ``throughput/model_flops`` (TFLOP/s): forward and backward FLOPs per device
    - ``throughput/hardware_flops`` (TFLOP/s): the same, recomputed activations included
    - ``throughput/mfu`` (fraction): model FLOP/s over the device's peak, where the peak is known

    Works with any strategy. On CUDA, logging synchronizes with the device.

    Args:
        peak_flops: Peak FLOP/s of one device; None: looked up by the device's name and the
            precision. There is none for CPUs.
        tokens: Function from this rank's batch to its number of tokens; None: taken from the batch
            spec of the model's plan.

    Raises:
        ConfigurationError: `peak_flops` is 0 or less.

    **Communicates**: one all-gather of five numbers at every logged step.

    Examples:
        >>> trainer = L.Trainer(callbacks=[ThroughputMonitor(peak_flops=989e12)])
    """

    def __init__(
        self,
        *,
        peak_flops: float | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__()
        if peak_flops is not None and peak_flops <= 0:
            raise ConfigurationError(
                "LP902",
                f"peak_flops={peak_flops} must be the peak FLOP/s of one device, such as 989e12. "
                "Correct it, or leave it out.",
            )
        self.peak_flops, self._tokens = peak_flops, tokens
        self._started: float | None = None
        self._paused = 0.0
        # Samples, tokens, model FLOPs and hardware FLOPs of this rank since the last logged step.
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._batches = 0

    @override
    def counter(self) -> AbstractContextManager[FlopCounter]:
        return FlopCounter()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if self.peak_flops is None and device.type == "cuda":
            dtype = compute_dtype(trainer.precision_plugin)
            self.peak_flops = get_available_flops(device, dtype)
        self._restart(None)

    @override
    def on_validation_start(self, *_: Any) -> None:
        # Less the start, plus the end: the sum over all validations is the time to exclude.
        self._paused -= time.monotonic()

    @override
    def on_validation_end(self, *_: Any) -> None:
        self._paused += time.monotonic()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._stop_counting()
        if self._started is None:  # the first step counted FLOPs in eager mode: no measure of time
            self._synchronize(trainer)
            self._restart(time.monotonic())
            return
        counter = self.counted
        samples, tokens = self._count(trainer, batch)
        flops = counter.model, counter.model + counter.recomputed
        self._batches += 1
        self._sums = [s + n for s, n in zip(self._sums, (samples, tokens, *flops), strict=True)]
        if is_logging_step(trainer):
            self._synchronize(trainer)
            now = time.monotonic()
            values = self._measure(trainer, now - self._started - self._paused)
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
            self._restart(now)

    def _restart(self, now: float | None) -> None:
        self._started, self._paused = now, 0.0
        self._sums, self._batches = [0.0, 0.0, 0.0, 0.0], 0

    def _synchronize(self, trainer: pl.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)

    def _measure(self, trainer: pl.Trainer, seconds: float) -> dict[str, float]:
        device = trainer.strategy.root_device
        found = gather_numbers([*self._sums, seconds], device)
        samples, tokens, model, hardware = (float(n) for n in found[:, :4].sum(0))
        # The ranks step together: the slowest one's time is the mesh's.
        devices, seconds = len(found), float(found[:, 4].max())
        values = {
            "samples": samples / seconds,
            "step": 1e3 * seconds / self._batches,
            "model_flops": model / seconds / devices / 1e12,
            "hardware_flops": hardware / seconds / devices / 1e12,
        }
        if tokens:
            values["tokens"] = tokens / seconds
        if self.peak_flops:
            values["mfu"] = model / seconds / devices / self.peak_flops
        return {f"throughput/{name}": value for name, value in values.items()}

    def _count(self, trainer: pl.Trainer, batch: Any) -> tuple[int, int]:
        """Return the samples and tokens of a batch on one rank per replica; (0, 0) on the others.

        The ranks of a replica have the same batch, which must be counted once.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, MeshStrategy):
            return batch_size(batch), 0 if self._tokens is None else self._tokens(batch)
        if strategy.mesh.replica_group.rank() != 0:
            return 0, 0
        if self._tokens is not None:
            return batch_size(batch), self._tokens(batch)
        batch_layout = strategy.parallel_model.resolved.plan.batch
        # Every sequence of a batch has the same tokens: the first entry is enough.
        for name, dim in batch_layout.sequence_dims.items():
            entry = batch_entry(batch, name)
            return batch_size(batch), entry.shape[0] * entry.shape[dim]
        return batch_size(batch), 0
