"""Trains with a fault or without one, with all checkers watching."""

import time
import warnings
from collections.abc import Callable, Sequence
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
from lightning_par.observe.live_bytes import LiveBytes

__all__ = ["CHECKED", "WATCHING", "Outcome", "Run", "play", "play_counted", "run_of"]

CHECKED = (0, 4, 8)
"""Steps that the proof and the trace check; the first step after a resume comes on top."""
WATCHING = ("first", "proof", "trace", "invariants")
"""Checkers that watch a run; "first" is the proof of the first step alone."""
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
    rank: int,
    world: int,
    run: Run,
    number: int | None,
    learned: list[Learned] | None,
    checks: Sequence[str],
) -> Outcome:
    """Train on one rank.

    Args:
        rank: Of this process.
        world: Number of ranks.
        run: What is trained.
        number: Of the fault in `FAULTS`; None: none.
        learned: What a healthy run has shown on each rank; None: it is learned now.
        checks: Those of `WATCHING` that watch.
    """
    warnings.simplefilter("ignore")
    fault = None if number is None else FAULTS[number]
    player = _Player(run, fault, Watcher(learned[rank] if learned else None), checks)
    for step in range(STEPS):
        player.take_step(step)
    return player.end()


def play_counted(rank: int, world: int, *given: Any) -> int:
    """Train on one rank, as `play`; return the most bytes that its tensors had at once."""
    with LiveBytes() as alive:
        play(rank, world, *given)
    return alive.peak


class _Player:
    """A run that goes on.

    Args:
        run: What is trained.
        fault: That is planted.
        watcher: Of its invariants.
        checks: Checkers that watch.
    """

    def __init__(
        self, run: Run, fault: Fault | None, watcher: Watcher, checks: Sequence[str]
    ) -> None:
        self._run, self._fault, self._watcher, self._checks = run, fault, watcher, checks
        self._outcome = Outcome()
        self._go_on(Trainer(build(run.config, run.seed)).save())

    def _go_on(self, saved: dict[str, Any]) -> None:
        self._saved = saved if self._compares else {}  # else it is not needed any more
        self._trainer = trainer_of(self._run.layout, self._run.config, saved, self._fault)
        if "invariants" in self._checks:
            self._watcher.attach(self._trainer)

    def take_step(self, step: int) -> None:
        """Take a step, with what comes before it."""
        resumes = self._run.resumes and step == BEGINS["resume"]
        if resumes:
            self._resume()
        if self._compares and (step in CHECKED or resumes):
            self._compare(step, fresh=resumes or step == 0)
        if step == 0:
            self._prove("proof", self._saved, "evaluation")
            self._outcome.metrics.append(self._evaluate())
        self._outcome.losses.append(self._train())
        self._outcome.norms.append(self._trainer.norm)

    @property
    def _compares(self) -> bool:
        """Whether a checker watches that compares with one process."""
        return not {"first", "proof", "trace"}.isdisjoint(self._checks)

    def _compare(self, step: int, *, fresh: bool) -> None:
        """Let the checkers look that compare the next step with one process."""
        # With the healthy method: a fault of checkpoints is not one of what is checked here.
        state = self._saved if fresh else Trainer.save(self._trainer)
        outcome, kind = self._outcome, "fresh" if fresh else "later"
        if step == 0 and "first" in self._checks:
            self._prove("first", state, kind)
            # A proof that goes on has begun with this step.
            outcome.verdicts["proof"] = outcome.verdicts["first"]
            outcome.seconds["proof"] = outcome.seconds["first"]
        else:
            self._prove("proof", state, kind)
        if "trace" in self._checks:
            traced = lambda: compare_traces(self._trainer, state, self._fault)  # noqa: E731
            outcome.check("trace", traced)

    def _evaluate(self) -> float:
        watcher, trainer = self._watcher, self._trainer
        if "invariants" in self._checks:
            return self._outcome.timed("invariants", lambda: watcher.evaluate(trainer))
        return float(trainer.evaluate(trainer.data.held_out()))

    def _train(self) -> float:
        watcher, trainer = self._watcher, self._trainer
        if "invariants" in self._checks:
            return self._outcome.timed("invariants", lambda: watcher.take_step(trainer))
        return trainer.train_step()

    def _resume(self) -> None:
        saved = self._trainer.save()
        self._prove("proof", saved, "fresh")  # what was written is what the run has
        self._trainer.comm.close()
        self._go_on(saved)

    def _prove(self, name: str, state: dict[str, Any], kind: str) -> None:
        if name in self._checks:
            proved = lambda: prove(self._trainer, state, self._fault, kind=kind)  # noqa: E731
            self._outcome.check(name, proved)

    def end(self) -> Outcome:
        """Return what came of it."""
        outcome, watcher = self._outcome, self._watcher
        if "invariants" in self._checks:
            outcome.verdicts["invariants"] = watcher.verdict
            outcome.learned = watcher.noted
            outcome.seconds["run"] = watcher.seconds
            outcome.seconds["invariants"] -= watcher.seconds
        self._trainer.comm.close()
        return outcome
