"""Holds the first steps of a run against the prediction by which its layout was chosen."""

import statistics
import time
from contextlib import ExitStack

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_par.observe.live_bytes import LiveBytes, OPTIMIZER, PARAMETERS
from lightning_par.strategies.auto.choice import Choice

__all__ = ["FirstSteps"]

_SKIPPED, _TIMED = 3, 5
"""Steps that warm up, of which the last counts bytes; and those whose median is the time."""
_APART = 0.25


class FirstSteps:
    """Measures the first optimizer steps, and says how far the prediction was off.

    The time of a step is the median of steps 4 to 8, from the first forward to the end of the
    optimizer; the slowest rank counts. Memory is that of the tensors of the fullest rank: on a GPU
    the allocator's peak in these steps, on the CPU what is alive in step 3, counted one by one.

    Args:
        choice: With a prediction.
        device: Of this rank.
        counts: Whether bytes are counted on the CPU; torch.compile hides them.
    """

    def __init__(self, choice: Choice, device: torch.device, *, counts: bool) -> None:
        self._choice, self._device, self._counts = choice, device, counts
        self._steps = 0
        self._began: float | None = None
        self._times: list[float] = []
        self._live: LiveBytes | None = None
        self._open = ExitStack()

    @property
    def is_over(self) -> bool:
        """Whether all steps are measured."""
        return self._steps >= _SKIPPED + _TIMED

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin a step, unless one has begun, as where several batches make a step."""
        if self._began is not None or self.is_over:
            return
        # One step only, not among those that are timed: counting every operation slows it down.
        if self._steps == _SKIPPED - 1 and self._counts and self._device.type == "cpu":
            self._live = self._open.enter_context(LiveBytes())
            self._live.mark(list(trainer.lightning_module.parameters()), PARAMETERS)
            self._live.mark([list(o.state.values()) for o in trainer.optimizers], OPTIMIZER)
        # After the warm-up, in which autotuning and first allocations take more.
        if self._steps == _SKIPPED and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._began = self._now()

    def end(self) -> None:
        """End a step; after the last one, compare.

        **Communicates**: after the last one, an all-reduce of two numbers over all ranks.
        """
        if self._began is None:
            return
        if self._steps >= _SKIPPED:
            self._times.append(self._now() - self._began)
        self._steps, self._began = self._steps + 1, None
        self._open.close()
        if self.is_over:
            self._compare()

    def close(self) -> None:
        """Measure nothing any more, as after an exception."""
        self._open.close()
        self._steps, self._began = _SKIPPED + _TIMED, None

    def _now(self) -> float:
        if self._device.type == "cuda":
            # Twice a step, and only in these few.
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _compare(self) -> None:
        peak = float(self._live.peak if self._live is not None else 0)
        if self._device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(self._device))
        # A median: one step that waited for data or a disk does not count.
        found = torch.tensor([statistics.median(self._times), peak], dtype=torch.float64)
        found = found.to(self._device)
        if dist.is_initialized():
            # Reached by every rank in the same step, as all of them step the optimizer alike.
            dist.all_reduce(found, dist.ReduceOp.MAX)
        seconds, peak = found.tolist()
        text, is_apart = self._describe(seconds, peak)
        if not is_apart:
            rank_zero_info(text)
            return
        rank_zero_warn(text + self._advice())

    def _describe(self, seconds: float, peak: float) -> tuple[str, bool]:
        predicted = self._choice.predicted
        assert predicted is not None
        pairs = {f"a step takes {seconds:.3g} s": (seconds, predicted.time.seconds, "s", 1.0)}
        if peak:
            needed = f"the rank with the most memory in use holds {peak / 2**20:.4g} MiB"
            pairs[needed] = (peak, predicted.memory.peak, "MiB", 2.0**20)
        texts = [
            f"{text}, predicted {guess / unit:.4g} {name} ({guess / real - 1:+.0%})"
            for text, (real, guess, name, unit) in pairs.items()
        ]
        is_apart = any(abs(guess / real - 1) > _APART for real, guess, _, _ in pairs.values())
        return f"auto_parallel: {'; '.join(texts)}.", is_apart

    def _advice(self) -> str:
        if self._choice.is_measured:
            return (
                " The prediction is wrong if other programs use this machine now, or used it when "
                f"the device profile {self._choice.profile!r} was measured. With accumulated "
                "batches the time also includes waiting for data."
            )
        return (
            f" The device profile {self._choice.profile!r} has the numbers of a datasheet, so "
            "another layout may be faster on this machine. Measure the machine with lightning-par "
            "calibrate --out mine.json, and pass profile='mine.json'."
        )
