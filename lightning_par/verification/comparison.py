"""Comparison of the traces of a parallel run and of one process, and its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_par.observe.compare import (
    Difference,
    EXACT,
    first_beyond,
    measure_backwards,
    measure_states,
)
from lightning_par.observe.report import StepRecord
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.run_trace import Trace

__all__ = [
    "Difference",
    "StepRow",
    "VerifyReport",
    "compare_steps",
    "differing_copies",
    "unsummed_gradients",
]


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


def compare_steps(
    one: Trace, ranks: Sequence[Trace]
) -> tuple[tuple[StepRow, ...], Difference | None]:
    """Compare every step that all runs finished.

    Args:
        one: Trace of the run on one process.
        ranks: Traces of the parallel run, in the order of the ranks.

    Returns:
        A row for each step, and the first difference, if any: of losses before that of gradients,
        and of those before that of weights; the largest of all ranks.
    """
    rows: list[StepRow] = []
    first: Difference | None = None
    for step, (plain, *meshes) in enumerate(
        zip(one.steps, *(t.steps for t in ranks), strict=False)
    ):
        worst: dict[str, Difference] = {}
        for rank, mesh in enumerate(meshes):
            for found in _measure(mesh, plain, one.ties):
                # Of all ranks the one with most excess stands for its kind.
                if found.kind not in worst or found.excess > worst[found.kind].excess:
                    worst[found.kind] = replace(found, step=step, rank=rank)
        largest = {kind: found.size / max(1.0, found.scale) for kind, found in worst.items()}
        rows.append(
            StepRow(
                step=step,
                wanted=plain.losses[0],
                got=meshes[0].losses[0],  # reduced over all ranks
                gradient=largest.get("gradient", 0.0),
                weight=largest.get("weight", 0.0),
            )
        )
        kinds = ("loss", "gradient", "weight")
        first = first or first_beyond(worst[kind] for kind in kinds if kind in worst)
    return tuple(rows), first


def _measure(mesh: StepRecord, one: StepRecord, ties: Mapping[str, str]) -> Iterator[Difference]:
    """Give the differences of a rank's step from one process, of what the rank holds."""
    # One process lists a tied weight once; a stage may hold it under its other name.
    names = {name: ties.get(name, name) for name in mesh.state}

    def held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[own] for name, own in names.items() if own in tensors}

    gradients = [found and held(found) for found in one.gradients]
    yield from measure_backwards(mesh, replace(one, gradients=gradients), EXACT)
    yield from measure_states({}, mesh.state, held(one.state), EXACT)


def differing_copies(ranks: Sequence[Trace], sizes: ParallelSizes) -> list[str]:
    """Return the unsharded parameters whose gradients differ between tensor-parallel ranks.

    Args:
        ranks: Traces of the parallel run, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.

    Returns:
        FQNs of the parameters, each once.
    """
    return list(
        dict.fromkeys(
            name
            for name, steps in _copies(ranks, sizes)
            # Of replicated parameters all ranks must have one gradient: what was to be summed is,
            # or is not, on all.
            if any(not _close(other, held[0]) for held in steps for other in held[1:])
        )
    )


def unsummed_gradients(one: Trace, ranks: Sequence[Trace], sizes: ParallelSizes) -> list[str]:
    """Return the unsharded parameters of whose gradient every tensor-parallel rank has a part.

    Args:
        one: Trace of the run on one process.
        ranks: Traces of the parallel run, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.

    Returns:
        FQNs of those whose gradients in the first step sum up to that of one process.
    """
    found = []
    for name, steps in _copies(ranks, sizes):
        parts = steps[0] if steps else []
        want = next(_gradients(one), {}).get(one.ties.get(name, name))
        # A zero gradient is both a part and the whole: not a symptom.
        if want is not None and len(parts) == sizes.tensor and not _close(parts[0], want):
            # Added up right, each a part: the all-reduce is missing.
            found += [name] * _close(sum(parts[1:], parts[0]), want)
    return list(dict.fromkeys(found))


def _copies(
    ranks: Sequence[Trace], sizes: ParallelSizes
) -> Iterator[tuple[str, list[list[Tensor]]]]:
    """Give the unsharded parameters: for every tensor-parallel group and every optimizer step, the
    gradients of its ranks.
    """
    for name in sorted({name for trace in ranks for name in trace.whole}):
        for group in sizes.groups(("tp",)):
            steps = zip(*(_gradients(ranks[rank]) for rank in group), strict=False)
            yield name, [[found[name] for found in step if name in found] for step in steps]


def _gradients(trace: Trace) -> Iterator[Mapping[str, Tensor]]:
    return (found for step in trace.steps for found in step.gradients if found is not None)


def _close(got: Tensor, wanted: Tensor) -> bool:
    return EXACT.distance(got, wanted) <= EXACT.gradient * max(EXACT.least, EXACT.norm(wanted))
