"""Print and draw a pipeline schedule before anything runs it."""

import argparse

from lightning_par.commands import takes_file
from lightning_par.engine.pipeline.schedules import build_schedule, SCHEDULES
from lightning_par.engine.pipeline.simulator import format_schedule, simulate, Simulation
from lightning_par.profiling.timeline_plot import draw_timeline

__all__ = ["main", "make_parser"]

_MAX_GRID_WIDTH = 300
"""Characters of a line above which a printed grid would only wrap."""


def main(arguments: list[str]) -> int:
    """Print the grid of a schedule, its bubble and the peak of micro-batches in flight per stage.

    Args:
        arguments: What follows ``lightning-par schedule``.

    Returns:
        The exit status, 0.

    Raises:
        ScheduleError: The schedule deadlocks or is malformed, or a time is negative.
        ConfigurationError: ``--out`` has another suffix, or matplotlib is not installed.
    """
    options = make_parser().parse_args(arguments)
    schedule = build_schedule(
        options.schedule, options.stages, options.microbatches, options.virtual
    )
    # The options are times of a whole rank; the simulator takes those of one stage.
    chunks = schedule.num_stages / schedule.num_ranks
    backward = options.backward_input + options.backward_weight
    simulation = simulate(
        schedule,
        forward=options.forward / chunks,
        backward=backward / chunks,
        backward_weight=options.backward_weight / chunks,
        p2p=options.p2p,
    )
    grid = format_schedule(schedule)
    if max(map(len, grid.splitlines())) <= _MAX_GRID_WIDTH:
        print(grid)
        print("(slots of 1 for a forward and for each half of a backward)\n")
    else:
        print(f"{grid.splitlines()[0]}; the grid is too wide to print, --out draws it.\n")
    print(_summary(simulation, options.forward + backward))
    if options.out:
        title = f"{schedule.name}, {schedule.num_microbatches} micro-batches"
        path = draw_timeline(simulation.events, options.out, title=title, unit="slots")
        print(f"\ndrawn: {path}")
    return 0


def _summary(simulation: Simulation, work: float) -> str:
    """Return the lines on makespan, bubble and memory.

    Args:
        simulation: Simulated schedule.
        work: Time of the forward and backward of one micro-batch on one rank.
    """
    stages = " ".join(map(str, simulation.peak_in_flight))
    ranks = " ".join(f"{peak:g}" for peak in simulation.peak_per_rank)
    return "\n".join(
        [
            f"step: {simulation.makespan:g} (a micro-batch takes {work:g} on every rank)",
            f"bubble: {simulation.bubble:.4f} of the step, all ranks",
            f"bubble: {simulation.span_bubble:.4f} of the longest span of a rank, from its first "
            "action to its last",
            f"micro-batches in flight at the peak, per stage: {stages}",
            f"  per rank, in parts of all its stages: {ranks}",
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="lightning-par schedule", description=__doc__)
    parser.add_argument(
        "--schedule", default="1f1b", help=f"{', '.join(sorted(SCHEDULES))}, or a file"
    )
    parser.add_argument("--stages", type=int, default=4, help="pipeline ranks (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="default: 8")
    parser.add_argument("--virtual", type=int, help="stages per rank, for interleaved (default: 2)")
    for name, what in (
        ("forward", "a forward"),
        ("backward-input", "the gradient of the input"),
        ("backward-weight", "the gradients of the weights"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=1.0, help=f"time of {what} of a rank (default: 1)"
        )
    parser.add_argument(
        "--p2p", type=float, default=0.0, help="time of a message to another rank (default: 0)"
    )
    takes_file(parser.add_argument("--out", help="draw it to this .png, .svg or .pdf"))
    return parser
