"""The command that shows a pipeline schedule."""

from lightning_par.commands import PathName
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import format_schedule, simulate
from lightning_par.profiling.timeline_plot import draw_timeline

__all__ = ["schedule"]

_MAX_GRID_WIDTH = 300
"""Characters of a line above which a printed grid would only wrap."""


def schedule(
    *,
    schedule: str = "1f1b",
    stages: int = 4,
    microbatches: int = 8,
    virtual: int | None = None,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    p2p: float = 0.0,
    out: PathName | None = None,
) -> None:
    """Print and draw a pipeline schedule before anything runs it: what every rank does when, the
    idle time (bubble), and the peak of micro-batches in flight per stage.

    Args:
        schedule: 1f1b, dualpipev, gpipe, interleaved, interleaved-zb, zb-h1, zb-h2, zbv, or a
            file.
        stages: Pipeline ranks.
        microbatches: Micro-batches of a step.
        virtual: Stages per rank, for interleaved and interleaved-zb (default: 2).
        forward: Time of a forward of a rank.
        backward_input: Time of the gradient of the input of a rank.
        backward_weight: Time of the gradients of the weights of a rank.
        p2p: Time of a message to another rank.
        out: Draw it to this .png, .svg or .pdf.

    Raises:
        ScheduleError: The schedule deadlocks or is malformed, or a time is negative.
        ConfigurationError: `out` has another suffix, or matplotlib is not installed.
    """
    built = build_schedule(schedule, stages, microbatches, virtual)
    # The options are times of a whole rank; the simulator takes those of one stage.
    chunks = built.num_stages / built.num_ranks
    backward = backward_input + backward_weight
    found = simulate(
        built,
        forward=forward / chunks,
        backward=backward / chunks,
        backward_weight=backward_weight / chunks,
        p2p=p2p,
    )
    grid = format_schedule(built)
    if max(map(len, grid.splitlines())) <= _MAX_GRID_WIDTH:
        print(grid)
        print("(slots of 1 for a forward and for each half of a backward)\n")
    else:
        print(f"{grid.splitlines()[0]}; the grid is too wide to print, --out draws it.\n")
    stages_at_peak = " ".join(map(str, found.peak_in_flight))
    ranks_at_peak = " ".join(f"{peak:g}" for peak in found.peak_per_rank)
    print(
        f"step: {found.makespan:g} (a micro-batch takes {forward + backward:g} on every rank)",
        f"bubble: {found.bubble:.4f} of the step, all ranks",
        f"bubble: {found.span_bubble:.4f} of the longest span of a rank, from its first action to "
        "its last",
        f"micro-batches in flight at the peak, per stage: {stages_at_peak}",
        f"  per rank, in parts of all its stages: {ranks_at_peak}",
        sep="\n",
    )
    if out:
        title = f"{built.name}, {built.num_microbatches} micro-batches"
        path = draw_timeline(found.events, out, title=title, unit="slots")
        print(f"\ndrawn: {path}")
