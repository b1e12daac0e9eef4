"""Comparison of the traces of a parallel run and of one process, and its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_par.sizes import ParallelSizes
from lightning_par.verification.run_trace import Trace

__all__ = ["Difference", "StepRow", "VerifyReport", "compare_steps", "first_difference"]

# Relative to the largest entry. Sums in another order differ by about 1e-15 per step in float64.
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First value in which a rank differs from one process.

    Attributes:
        kind: What differs; in a step, losses are compared before gradients, those before weights.
        step: Step, counted from 0.
        name: FQN of the parameter; empty for a loss.
        rank: Global rank.
        size: Largest absolute difference of an entry.
        scale: Largest absolute entry on one process.
    """

    kind: Literal["loss", "gradient", "weight"]
    step: int
    name: str
    rank: int
    size: float
    scale: float

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        return (
            f"the {self.kind}{of} at step {self.step} differs on rank {self.rank} by "
            f"{self.size:.3g} (largest value {self.scale:.3g})"
        )


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Comparison of one step.

    Attributes:
        step: Step, counted from 0.
        wanted: Loss on one process.
        got: Loss of the parallel run.
        gradient: Largest difference of a gradient's entry, relative to the largest entry of that
            gradient or to 1, whichever is larger.
        weight: Largest difference of a weight's entry, likewise.
    """

    step: int
    wanted: float
    got: float
    gradient: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Verdict on a parallel run; `str` gives the table.

    Attributes:
        sizes: Mesh sizes that were run.
        asked: Mesh sizes of the user's strategy.
        rows: One row per step that all ranks and the one process finished.
        first: First difference; None if there is none.
        causes: Likely causes of the difference, most likely first.
        notes: What the comparison left out.

    Examples:
        >>> sizes = ParallelSizes(tensor=2)
        >>> VerifyReport(sizes=sizes, asked=sizes, rows=(), first=None, causes=(), notes=()).equal
        True
    """

    sizes: ParallelSizes
    asked: ParallelSizes
    rows: tuple[StepRow, ...]
    first: Difference | None
    causes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no value differs and no run failed."""
        return self.first is None and not self.causes

    def _without(self) -> str:
        return "nothing differs without dropout" if self.rows else "the run failed"

    def __str__(self) -> str:
        asked = "" if self.sizes == self.asked else f" (in place of {self.asked})"
        lines = [f"{self.sizes}{asked} against one process, float64", ""]
        lines.append("step      one process           layout   gradients     weights")
        lines += [
            f"{row.step:4}  {row.wanted:15.10f}  {row.got:15.10f}  {row.gradient:10.1e}  "
            f"{row.weight:10.1e}"
            for row in self.rows
        ]
        lines.append("")
        lines.append("equal" if self.equal else f"not equal: {self.first or self._without()}")
        lines += [f"likely cause: {cause}" for cause in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def compare_steps(one: Trace, ranks: Sequence[Trace]) -> tuple[StepRow, ...]:
    """Compare every step that all runs finished.

    Args:
        one: Trace of the run on one process.
        ranks: Traces of the parallel run, in the order of the ranks.
    """
    count = min(len(trace.losses) for trace in (one, *ranks))
    return tuple(
        StepRow(
            step=step,
            wanted=one.losses[step],
            got=ranks[0].losses[step],  # reduced over all ranks
            gradient=max(_worst(t.gradients[step], one.gradients[step], one.ties) for t in ranks),
            weight=max(_worst(t.weights[step], one.weights[step], one.ties) for t in ranks),
        )
        for step in range(count)
    )


def first_difference(one: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Return the first value in which the parallel run differs from one process, if any.

    Args:
        one: Trace of the run on one process.
        ranks: Traces of the parallel run, in the order of the ranks.
    """
    for step in range(min(len(trace.losses) for trace in (one, *ranks))):
        for rank, trace in enumerate(ranks):
            size, scale = abs(trace.losses[step] - one.losses[step]), abs(one.losses[step])
            if not size <= _TOLERANCE * max(1.0, scale):  # not "size >": NaN differs, too
                fields = {"step": step, "name": "", "rank": rank, "size": size, "scale": scale}
                return Difference(kind="loss", **fields)  # type: ignore[arg-type]
        for kind in ("gradient", "weight"):
            found = _first_tensor(kind, step, one, ranks)
            if found is not None:
                return found
    return None


def _first_tensor(
    kind: Literal["gradient", "weight"], step: int, one: Trace, ranks: Sequence[Trace]
) -> Difference | None:
    """Return the parameter with the largest difference in one step, if any differs."""
    worst: Difference | None = None
    for rank, trace in enumerate(ranks):
        got, want = (getattr(t, f"{kind}s")[step] for t in (trace, one))
        for name, value in got.items():
            wanted = want.get(one.ties.get(name, name))
            size, scale = _difference(value, wanted)
            if size <= _TOLERANCE * max(1.0, scale):
                continue
            if worst is None or size > worst.size:
                worst = Difference(
                    kind=kind, step=step, name=name, rank=rank, size=size, scale=scale
                )
    return worst


def _difference(got: Tensor | None, want: Tensor | None) -> tuple[float, float]:
    """Return the largest difference of an entry, and the largest entry of `want`."""
    if got is None and want is None:
        return 0.0, 0.0
    # A gradient that is None counts as 0: a rank may have nothing to add to a frozen or unused one.
    if got is None or want is None:
        there = got if want is None else want
        assert there is not None
        size = float(there.abs().max()) if there.numel() else 0.0
        return size, size
    if not got.numel():
        return 0.0, 0.0
    # NaN would be no larger than any tolerance.
    return float((got - want).abs().nan_to_num(torch.inf).max()), float(want.abs().max())


def _worst(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], ties: Mapping[str, str]
) -> float:
    found = [0.0]
    for name, value in got.items():
        size, scale = _difference(value, want.get(ties.get(name, name)))
        found.append(size / max(1.0, scale))
    return max(found)
