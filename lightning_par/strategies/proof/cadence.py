"""Which optimizer steps of a run are proved."""

import math
import random
from collections.abc import Callable
from time import monotonic

from lightning_par.engine.rng import seed_of

__all__ = ["Cadence"]

_LEAST = 10
"""Optimizer steps from one proof to the next, at least, where a budget of time chooses them."""


class Cadence:
    """Chooses the steps that are proved.

    Note [Budget of the proofs]: proofs may take a share of the time of the run. The cost of a proof
    is the time from its first exchange to its verdict, less that of a usual step; the last cost
    predicts the next. The next proof is due once the share has paid for it and for all before, or
    after up to twice as many steps, drawn from the seed, so that it is not always at the same place
    of an epoch. The first proof is always made, and counts as a prediction only. Rank 0 decides, by
    its clock, and tells the others after the verdict. After the first proof nobody knows yet what a
    usual step takes: rank 0 then puts a due step off in the exchange that would begin its proof.

    Args:
        every: Steps from one proof to the next; None: see `share`.
        share: Share of the time of the run that proofs may take, in (0, 1); None: only the first
            step is proved if `every` is None, too.
        seed: Of the run.
        clock: Returns seconds.

    Attributes:
        share: As given.
        next: Number of the next step that is due, the same on every rank; None: there is none.
    """

    def __init__(
        self,
        *,
        every: int | None,
        share: float | None,
        seed: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._every, self.share, self._clock = every, share, clock
        self._random = random.Random(seed_of("proved steps", seed))
        self.next: int | None = 0
        self._began, self._cost, self._spent = 0.0, 0.0, 0.0
        self._since: float | None = None  # when the budget begins
        self._last = 0.0, 0  # when the last proof ended, and the step after it

    def begin(self) -> None:
        """Note that a proof begins with the step that is about to be taken."""
        self._began = self._clock()

    def end(self, step: int, forecast: float = 0.0) -> None:
        """Choose the next step after the proof of this one; the choice of rank 0 counts.

        Args:
            step: Number of the step that was proved, or could not be.
            forecast: Seconds that the proof would have taken, if it was left out for them.
        """
        if self.share is None:
            self.next = None if self._every is None else step + self._every
            return
        now = self._clock()
        self._cost = forecast or now - self._began
        if self._since is None:
            self._since, self.next = now, step + _LEAST
        else:
            self._cost = max(0.0, self._cost - self._usual(self._began, step))
            self._spent += self._cost
            self.next = self._after(step, self._missing(now), self._usual(self._began, step))
        self._last = now, step + 1

    def put_off(self, step: int) -> int | None:
        """Return the step that is proved in place of a due one; None: the due one is. Rank 0 asks.

        Args:
            step: The due step, which is about to begin.
        """
        if self.share is None or not self._cost:
            return None
        now = self._clock()
        if self._since is None:
            self._since, self._last = now, (now, step)
            return step + _LEAST
        missing = self._missing(now)
        return self._after(step, missing, self._usual(now, step)) if missing > 0 else None

    def pause(self) -> None:
        """Leave the time until the next run out of the budget."""
        if self.share is not None:
            self._since, self._spent, self.next = None, 0.0, 0

    def _missing(self, now: float) -> float:
        """Return after how many seconds the share has paid for the next proof."""
        assert self._since is not None
        assert self.share is not None
        return (self._spent + self._cost) / self.share - (now - self._since)

    def _usual(self, now: float, step: int) -> float:
        """Return the time of a step without a proof, in seconds, since the last one."""
        start, first = self._last
        return (now - start) / max(1, step - first)

    def _after(self, step: int, missing: float, usual: float) -> int:
        steps = max(_LEAST, math.ceil(missing / max(usual, 1e-6)))
        return step + self._random.randint(steps, 2 * steps)
