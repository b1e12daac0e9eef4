"""What checkers have found, and their score."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.zoo.fault import Fault, FAULTS, PHASES
from benchmarks.zoo.play import WATCHING
from benchmarks.zoo.proof import Verdict

__all__ = ["CHECKERS", "Healthy", "Row", "counts_by_phase", "score_table"]

CHECKERS = {
    "proof": "the proof (`compare`)",
    "first": "its first step alone",
    "trace": "full trace, as TTrace",
    "invariants": "invariants, as TrainCheck",
    "loss": "loss differs by 1 % from a reference run",
    "norm": "gradient norm differs by 5 %",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a fault.

    Attributes:
        number: Of the fault in `FAULTS`; faults are functions, which processes cannot send.
        found: Checker -> what it has found; None: nothing.
        changed: Largest relative difference of a loss from the healthy run.
        crash: What ended the run; empty: nothing did.
    """

    number: int
    found: Mapping[str, Verdict | None] = field(default_factory=lambda: dict.fromkeys(CHECKERS))
    changed: float = 0.0
    crash: str = ""

    @property
    def fault(self) -> Fault:
        """The fault."""
        return FAULTS[self.number]

    def is_at_once(self, checker: str) -> bool:
        """Tell whether it was found in the first step in which it acts."""
        verdict = self.found[checker]
        return verdict is not None and verdict.step <= self.fault.begins

    def is_blamed(self, checker: str) -> bool:
        """Tell whether phase, and axis if one is named, are those of the fault."""
        verdict, fault = self.found[checker], self.fault
        if verdict is None or verdict.phase != fault.phase:
            return False
        return not verdict.axis or _axes(verdict.axis) == _axes(fault.axis)

    def __str__(self) -> str:
        if self.crash:
            return f"{self.fault.name}: CRASH {self.crash}"
        fault = self.fault
        cells = [f"{name} {self._cell(name)}" for name in CHECKERS]
        where = f"{fault.when}, {fault.phase}, {fault.axis}"
        return f"{fault.name} ({where}; loss {self.changed:.0e}): {'; '.join(cells)}"

    def _cell(self, checker: str) -> str:
        verdict = self.found[checker]
        if verdict is None:
            return "-"
        named = " ".join(word for word in (verdict.phase, verdict.axis) if word)
        wrong = "" if self.is_blamed(checker) or not named else " WRONG"
        return f"{verdict.step}" + (f" ({named}{wrong})" if named else "")


def _axes(text: str) -> set[str]:
    return set(text.split(" x "))


@dataclass(frozen=True, kw_only=True)
class HealthyRun:
    """What came of one healthy run.

    Attributes:
        alarms: Checker -> what it said, if it found something.
        time: Checker -> its time over that of the run.
    """

    alarms: Mapping[str, str]
    time: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """What came of healthy runs; nothing, where they were not run.

    Attributes:
        alarms: Checker -> runs in which it found something.
        time: Checker -> its time over that of the run.
        memory: Checker -> peak of a rank's tensors with it over that without it.
    """

    alarms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    time: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(runs: Sequence[HealthyRun], memory: Mapping[str, float]) -> "Healthy":
        """Return what came of all of them; times are medians."""
        return Healthy(
            alarms={n: [run.alarms[n] for run in runs if n in run.alarms] for n in CHECKERS},
            time={name: statistics.median(run.time[name] for run in runs) for name in WATCHING},
            memory=memory,
        )


def score_table(rows: Sequence[Row], healthy: Healthy) -> str:
    """Return the score of each checker, as a table in Markdown.

    Args:
        rows: Of all faults.
        healthy: False alarms and costs.
    """
    early = [row for row in rows if row.fault.when in ("first", "evaluation")]
    late = [row for row in rows if row.fault.when not in ("first", "evaluation")]
    lines = [
        f"| checker | of {len(early)} that act from the start: before the first update, by step "
        f"10 | of {len(late)} that act later | of these, in the step where it begins | blamed "
        "rightly | false alarms | more time, run = 1 | memory, run = 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, title in CHECKERS.items():
        at_once = sum(row.is_at_once(name) for row in early)
        ever = sum(row.found[name] is not None for row in early)
        later = [row for row in late if row.found[name] is not None]
        told = [row for row in rows if row.found[name] is not None and row.found[name].phase]
        blamed = sum(row.is_blamed(name) for row in told)
        cells = [
            title,
            f"{at_once} ({_share(at_once, early)}), {ever} ({_share(ever, early)})",
            f"{len(later)} ({_share(len(later), late)})",
            str(sum(row.is_at_once(name) for row in later)),
            f"{blamed} of {len(told)} ({_share(blamed, told)})" if told else "names nothing",
            f"{len(healthy.alarms[name])} of 40" if healthy.alarms else "not run",
            _cost(healthy.time, name),
            _cost(healthy.memory, name),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counts_by_phase(rows: Sequence[Row]) -> dict[str, Any]:
    """Return for each phase how many faults it has, and for each checker how many it found in the
    step where they begin, and in later ones.
    """
    phases: dict[str, Any] = {}
    for phase in PHASES:
        of_phase = [row for row in rows if row.fault.phase == phase]
        found: dict[str, Any] = {"faults": len(of_phase)}
        for name in CHECKERS:
            at_once = sum(row.is_at_once(name) for row in of_phase)
            ever = sum(row.found[name] is not None for row in of_phase)
            found[name] = [at_once, ever - at_once]
        phases[phase] = found
    return {"checkers": CHECKERS, "phases": phases}


def _share(count: int, of: Sequence[Row]) -> str:
    return f"{100 * count / len(of):.0f} %" if of else "-"


def _cost(factors: Mapping[str, float], name: str) -> str:
    if name not in WATCHING:
        return "a run of one process"
    return f"{factors[name]:.1f}" if factors else "not run"
