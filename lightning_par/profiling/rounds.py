"""Times pieces of work in rounds, on one rank or on all, and fits lines through the times."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.checkpoint.progress import advance

__all__ = ["Rounds", "fit_positive", "nothing", "rank", "world"]

_ROUNDS = 5
"""Timed rounds of each measurement, of which the median counts."""


class Rounds:
    """Timed rounds of work on this rank's device.

    Args:
        device: Of this rank.
        dtype: Of what it computes and sends.
        round_seconds: What a timed round takes at least.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, round_seconds: float) -> None:
        self.device, self.dtype, self.round_seconds = device, dtype, round_seconds
        self.scale = 1 if device.type == "cpu" else 8  # what is large for it

    def tensor(self, *shape: int, grad: bool = False) -> Tensor:
        """Return random numbers."""
        made = torch.randn(shape, device=self.device, dtype=self.dtype)
        return made.requires_grad_() if grad else made

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of one call, of rounds that are long enough to be timed."""
        # Once beforehand: it connects, compiles and allocates.
        work()
        calls = max(1, math.ceil(self.round_seconds / max(self.timed(work, 1), 1e-7)))
        median = statistics.median(self.timed(work, calls) for _ in range(_ROUNDS))
        advance("measurements")
        return median

    def timed(self, work: Callable[[], object], calls: int) -> float:
        """Return the mean time of so many calls."""
        # Before the clock starts: what is queued from before is no part of it.
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - start) / calls

    def wait(self) -> None:
        """Wait for what the device was given to do."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def together(self, *works: Callable[[], object], rounds: int = _ROUNDS) -> list[list[float]]:
        """Return the seconds of every work in each round, on the slowest rank.

        Works take turns, so that all of them meet whatever else the machine does. Every rank of
        the default group calls this.
        """
        calls = [1] * len(works)
        found: list[list[float]] = [[] for _ in works]
        for attempt in range(rounds + 2):
            for place, work in enumerate(works):
                took = self._slowest(work, calls[place])
                if attempt == 1:  # the first one connects
                    calls[place] = max(1, math.ceil(self.round_seconds / 2 / took))
                elif attempt > 1:
                    found[place].append(took)
        advance("measurements")
        return found

    def _slowest(self, work: Callable[[], object], calls: int) -> float:
        # All begin together: a rank alone at work is faster than one among others.
        dist.barrier()
        start = time.perf_counter()
        self.timed(work, calls)
        # A rank that waits for a core starts late: the first to start sees the last one's end.
        dist.barrier()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=self.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took) / calls


def nothing() -> None:
    """Stand for the work of others, on a rank that has no part in it."""


def fit_positive(rows: list[list[float]], times: list[float]) -> list[float]:
    """Return positive factors with the least squares of relative errors of rows @ factors."""
    # Divided by the times: each row's error is relative, so that short times count as much as
    # long ones.
    A = torch.tensor(rows, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    # Columns of like size, as FLOPs and seconds differ by 15 powers of ten.
    scale = A.amax(0)
    free = list(range(A.shape[1]))
    while True:
        chosen = (A / scale)[:, free]
        found = torch.linalg.lstsq(chosen, torch.ones(len(A), 1, dtype=torch.float64)).solution
        values = found[:, 0].tolist()
        if min(values) > 0 or len(free) == 1:
            break
        # A factor that noise makes negative counts for nothing; the others are fitted without it.
        free.remove(free[values.index(min(values))])
    # Positive, as callers divide by it.
    factors = [1e-12 / float(s) for s in scale]
    for place, value in zip(free, values, strict=True):
        factors[place] = max(value, 1e-12) / float(scale[place])
    return factors


def rank() -> int:
    """Return this process's rank; 0 without a default group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks; 1 without a default group."""
    return dist.get_world_size() if dist.is_initialized() else 1
