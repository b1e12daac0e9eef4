"""Trains with a fault or without one, with all checkers watching."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import benchmarks.zoo.faults  # noqa: F401  (it fills FAULTS)
from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import BEGINS, Fault, FAULTS, STEPS
from benchmarks.zoo.invariants import Learned, Watcher
from benchmarks.zoo.model import build, Config
from benchmarks.zoo.proof import prove, trainer_of, Verdict
from benchmarks.zoo.trace import compare_traces
from benchmarks.zoo.trainer import Trainer

__all__ = ["CHECKED", "Outcome", "Run", "play", "run_of"]

CHECKED = (0, 4, 8)
"""Steps that the proof and the trace check; the first step after a resume comes on top."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained.

    Attributes:
        layout: Of the ranks.
        options: Of the model's configuration.
        seed: Of the initial weights.
        resumes: Whether it goes on from a checkpoint before step `BEGINS["resume"]`.
    """

    layout: Layout
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    resumes: bool = False

    @property
    def config(self) -> Config:
        """Configuration of the model."""
        return Config(**dict(self.options))


def run_of(fault: Fault) -> Run:
    """Return the run of a fault."""
    options = tuple(sorted(fault.options.items()))
    return Run(layout=fault.layout, options=options, resumes=fault.when == "resume")


@dataclass(kw_only=True)
class Outcome:
    """What came of a run.

    Attributes:
        losses: Of each step.
        norms: Of all gradients, in each step.
        metrics: Of the evaluation before the first step.
        verdicts: Checker -> what it has found first.
        seconds: Checker -> what it took; "run": the run itself.
        learned: What this rank has shown, for `invariants`.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    verdicts: dict[str, Verdict | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    learned: Learned = field(default_factory=list)

    def timed(self, name: str, call: Callable[[], T]) -> T:
        """Call a function and note what it took."""
        began = time.perf_counter()
        found = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return found

    def check(self, name: str, call: Callable[[], Verdict | None]) -> None:
        """Let a checker look, unless it has found something."""
        if self.verdicts.setdefault(name, None) is None:
            self.verdicts[name] = self.timed(name, call)


def play(
    rank: int, world: int, run: Run, number: int | None, learned: list[Learned] | None, checks: bool
) -> Outcome:
    """Train on one rank.

    Args:
        rank: Of this process.
        world: Number of ranks.
        run: What is trained.
        number: Of the fault in `FAULTS`; None: none.
        learned: What a healthy run has shown on each rank; None: it is learned now.
        checks: Whether the checkers watch.
    """
    warnings.simplefilter("ignore")
    fault = None if number is None else FAULTS[number]
    player = _Player(run, fault, Watcher(learned[rank] if learned else None))
    for step in range(STEPS):
        player.take_step(step, checks)
    return player.end()


class _Player:
    """A run that goes on.

    Args:
        run: What is trained.
        fault: That is planted.
        watcher: Of its invariants.
    """

    def __init__(self, run: Run, fault: Fault | None, watcher: Watcher) -> None:
        self._run, self._fault, self._watcher = run, fault, watcher
        self._outcome = Outcome()
        self._go_on(Trainer(build(run.config, run.seed)).save())

    def _go_on(self, saved: dict[str, Any]) -> None:
        self._saved = saved
        self._trainer = trainer_of(self._run.layout, self._run.config, saved, self._fault)
        self._watcher.attach(self._trainer)

    def take_step(self, step: int, checks: bool) -> None:
        """Take a step, with what comes before it."""
        outcome, watcher = self._outcome, self._watcher
        resumes = self._run.resumes and step == BEGINS["resume"]
        if resumes:
            self._resume(checks)
        if checks and (step in CHECKED or resumes):
            # With the healthy method: a fault of checkpoints is not one of what is checked here.
            fresh = resumes or step == 0
            state = self._saved if fresh else Trainer.save(self._trainer)
            self._prove(state, "fresh" if fresh else "later")
            outcome.check("trace", lambda: compare_traces(self._trainer, state, self._fault))
        if step == 0:
            if checks:
                self._prove(self._saved, "evaluation")
            metric = outcome.timed("invariants", lambda: watcher.evaluate(self._trainer))
            outcome.metrics.append(metric)
        loss = outcome.timed("invariants", lambda: watcher.take_step(self._trainer))
        outcome.losses.append(loss)
        outcome.norms.append(self._trainer.norm)

    def _resume(self, checks: bool) -> None:
        saved = self._trainer.save()
        if checks:  # what was written is what the run has
            self._prove(saved, "fresh")
        self._trainer.comm.close()
        self._go_on(saved)

    def _prove(self, state: dict[str, Any], kind: str) -> None:
        proved = lambda: prove(self._trainer, state, self._fault, kind=kind)  # noqa: E731
        self._outcome.check("proof", proved)

    def end(self) -> Outcome:
        """Return what came of it."""
        outcome, watcher = self._outcome, self._watcher
        outcome.verdicts["invariants"] = watcher.verdict
        outcome.learned = watcher.noted
        outcome.seconds["run"] = watcher.seconds
        outcome.seconds["invariants"] -= watcher.seconds
        self._trainer.comm.close()
        return outcome
