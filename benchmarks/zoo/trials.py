"""Runs faults and healthy runs on ranks, and reads curves against those of one process."""

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import as_completed, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import FAULTS
from benchmarks.zoo.healthy import Case, HEALTHY
from benchmarks.zoo.invariants import Learned
from benchmarks.zoo.play import Outcome, play, play_counted, Run, run_of, WATCHING
from benchmarks.zoo.proof import Verdict
from benchmarks.zoo.score import Healthy, HealthyRun, Row
from tests.support.ranks.api import RankError, run_ranks

__all__ = ["Trials", "try_all"]

_TIMEOUT = 120
_AT_ONCE = 2
"""Faults that are tried side by side, each on up to eight ranks."""
_LEARNS = ("invariants",)
_MEASURED = HEALTHY[0:10:2]
"""Healthy runs in which memory is measured; each has another layout."""


def try_all(numbers: Sequence[int], *, healthy: bool) -> tuple[list[Row], Healthy]:
    """Print and return what comes of faults, and of healthy runs.

    Two runs go on at a time: the ranks of one wait for each other, which leaves a third of two
    cores idle. Runs of one kind follow each other in one process, which keeps what it compares
    them with.

    Args:
        numbers: Of the faults.
        healthy: Whether there are healthy runs.
    """
    by_run: dict[Run, list[int]] = {}
    for number in numbers:
        by_run.setdefault(run_of(FAULTS[number]), []).append(number)
    rows: dict[int, Row] = {}
    with ProcessPoolExecutor(_AT_ONCE, mp_context=get_context("spawn")) as pool:
        memory = pool.submit(_measure_memory) if healthy else None
        largest_first = sorted(by_run.values(), key=len, reverse=True)
        tried = [pool.submit(_try_faults, same) for same in largest_first]
        parts = [HEALTHY[n : n + 5] for n in range(0, len(HEALTHY), 5)] if healthy else []
        ran = [pool.submit(_try_healthy, part) for part in parts]
        for done in as_completed(tried):
            for row in done.result():
                rows[row.number] = row
                print(row, flush=True)
        found = [rows[number] for number in numbers]
        if memory is None:
            return found, Healthy()
        runs = [one for part in ran for one in part.result()]
        return found, Healthy.of(runs, memory.result())


def _try_faults(numbers: Sequence[int]) -> list[Row]:
    trials = Trials()
    return [trials.try_fault(number) for number in numbers]


def _try_healthy(cases: Sequence[Case]) -> list[HealthyRun]:
    trials = Trials()
    return [trials.try_healthy(case) for case in cases]


def _measure_memory() -> dict[str, float]:
    return Trials().measure_memory()


class Trials:
    """Runs, of which the healthy ones are kept to compare others with."""

    def __init__(self) -> None:
        self._learned: dict[Run, list[Outcome]] = {}
        self._alone: dict[tuple[Run, int | None], Outcome] = {}

    def try_fault(self, number: int) -> Row:
        """Train with a fault, and return what the checkers have found."""
        fault = FAULTS[number]
        run = run_of(fault)
        healthy = self._healthy(run)
        try:
            outcome = self._play(run, number, healthy)
        except RankError as error:
            return Row(number=number, crash=str(error).splitlines()[0])
        losses = zip(outcome.losses, healthy[0].losses, strict=True)
        return Row(
            number=number,
            found=self._verdicts(run, outcome, number if fault.is_shared else None),
            changed=max(abs(a - b) / abs(b) for a, b in losses),
        )

    def try_healthy(self, case: Case) -> HealthyRun:
        """Train without faults."""
        layout, options, seed, resumes = case
        run = Run(layout=layout, options=tuple(options.items()), seed=seed, resumes=resumes)
        outcome = self._play(run, None, self._healthy(replace(run, seed=0)))
        verdicts = self._verdicts(run, outcome).items()
        return HealthyRun(
            alarms={
                name: f"{layout} {options}: {verdict.text or verdict.phase}"
                for name, verdict in verdicts
                if verdict is not None
            },
            time={name: outcome.seconds[name] / outcome.seconds["run"] for name in WATCHING},
        )

    def measure_memory(self) -> dict[str, float]:
        """Return for each checker the peak of the tensors of a rank with it over that without it,
        on the rank where this is most; the median over healthy runs.
        """
        shares: dict[str, list[float]] = {name: [] for name in WATCHING}
        for layout, options, seed, resumes in _MEASURED:
            run = Run(layout=layout, options=tuple(options.items()), seed=seed, resumes=resumes)
            learned = [outcome.learned for outcome in self._healthy(replace(run, seed=0))]
            without = self._peak(run, learned, ())
            for name in WATCHING:
                shares[name].append(self._peak(run, learned, (name,)) / without)
        return {name: statistics.median(found) for name, found in shares.items()}

    def _peak(self, run: Run, learned: list[Learned], checks: tuple[str, ...]) -> int:
        given = run, None, learned, checks
        return max(run_ranks(play_counted, run.layout.world, *given, timeout=_TIMEOUT))

    def _healthy(self, run: Run) -> list[Outcome]:
        if run not in self._learned:
            found = run_ranks(play, run.layout.world, run, None, None, _LEARNS, timeout=_TIMEOUT)
            self._learned[run] = found
        return self._learned[run]

    def _play(self, run: Run, number: int | None, healthy: list[Outcome]) -> Outcome:
        learned = [outcome.learned for outcome in healthy]
        arguments = run, number, learned, WATCHING
        outcome: Outcome = run_ranks(play, run.layout.world, *arguments, timeout=_TIMEOUT)[0]
        return outcome

    def _verdicts(
        self, run: Run, outcome: Outcome, shared: int | None = None
    ) -> dict[str, Verdict | None]:
        """Return what each checker has found; curves are those of one process, with the number of
        the fault that it has, too.
        """
        alone = replace(run, layout=Layout(micro=run.layout.micro))
        key = alone, shared
        if key not in self._alone:
            self._alone[key] = play(0, 1, alone, shared, None, ())
        wanted = self._alone[key]
        metrics = _beyond(outcome.metrics, wanted.metrics, 0.01)
        return {
            **outcome.verdicts,
            "loss": _beyond(outcome.losses, wanted.losses, 0.01) or metrics,
            "norm": _beyond(outcome.norms, wanted.norms, 0.05),
        }


def _beyond(got: list[float], wanted: list[float], share: float) -> Verdict | None:
    """Return the first step in which a curve is further off than a share of the reference."""
    pairs = enumerate(zip(got, wanted, strict=True))
    found = (step for step, (a, b) in pairs if not math.isclose(a, b, rel_tol=share))
    step = next(found, None)
    return None if step is None else Verdict(step=step)
