"""Draws the pipeline schedules from the engine's simulator; the options are those of draw.py."""

from collections.abc import Sequence

from canvas import BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as MplPath

from lightning_par.engine.pipeline.actions import ActionKind, TimedAction
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate, Simulation

STAGES, MICRO_BATCHES = 4, 8
COLORS = {
    ActionKind.FORWARD: BLUE,
    ActionKind.BACKWARD: ORANGE,
    ActionKind.BACKWARD_INPUT: ORANGE,
    ActionKind.BACKWARD_WEIGHT: GREEN,
}
ROW, WIDE = 0.36, 7.4


def draw_grid(
    axes: Axes, events: Sequence[Sequence[TimedAction]], top: float, unit: float, word: str
) -> None:
    """A row per rank; actions of its second stage have a dark rim below."""
    span = max(event.end for row in events for event in row)
    for rank, row in enumerate(events):
        y = top + rank * ROW
        write(axes, 0.2, y + 0.15, f"{word} {rank}", size=8.5)
        box(axes, 0.85, y, span * unit, 0.3, fill=PALE[GREY])
        lowest = min(event.action.stage for event in row)
        places = [(0.85 + e.start * unit, (e.end - e.start) * unit, e.action) for e in row]
        for kind, color in COLORS.items():
            boxes(axes, [(x, y, w, 0.3) for x, w, a in places if a.kind is kind], color, 0.8)
        rims = [(x, y + 0.25, w, 0.04) for x, w, a in places if a.stage > lowest]
        boxes(axes, rims, "black", 0.3)
        for x, w, action in places:
            size = min(8.0, 72 * w / 1.3)
            number = str(action.microbatch)
            write(axes, x + w / 2, y + 0.15, number, ha="center", size=size, color="white")


def boxes(
    axes: Axes, places: Sequence[tuple[float, float, float, float]], fill: str, rim: float
) -> None:
    """Rectangles of x, y, width and height as one shape, which keeps the file small."""
    if places:
        corners = [
            [(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in places
        ]
        whole = MplPath.make_compound_path(*(MplPath(c, closed=True) for c in corners))
        axes.add_patch(PathPatch(whole, facecolor=fill, edgecolor="white", linewidth=rim))


def draw_held(axes: Axes, x: float, top: float, peaks: Sequence[float]) -> None:
    """A small box per micro-batch that a rank holds at its peak; half a box is half its stages."""
    write(axes, x, top - 0.15, "micro-batches held", size=8, color=SOFT)
    for rank, peak in enumerate(peaks):
        y = top + rank * ROW
        for held in range(int(peak)):
            box(axes, x + 0.14 * held, y + 0.06, 0.12, 0.18, fill=GREEN)
        if peak % 1:
            box(axes, x + 0.14 * int(peak), y + 0.06, 0.12 * (peak % 1), 0.18, fill=GREEN)
        write(axes, x + 0.05 + 0.14 * -(-peak // 1), y + 0.15, f"{peak:g}", size=8)


def draw_keys(axes: Axes, y: float, keys: Sequence[tuple[float, str, str]]) -> None:
    for x, color, text in keys:
        box(axes, x, y - 0.08, 0.2, 0.16, fill=color)
        write(axes, x + 0.27, y, text, size=8)


def percent(fraction: float) -> str:
    return f"{fraction:.1%}".replace("%", " %")


def schedules() -> Figure:
    figure, axes = canvas(10, 4.6, title="Two schedules: 4 stages, 8 micro-batches")
    top = 0.85
    for name, label in (("gpipe", "GPipe"), ("1f1b", "1F1B")):
        simulation = simulate(build_schedule(name, STAGES, MICRO_BATCHES))
        text = f"{label}: idle {percent(simulation.bubble)} of the time"
        write(axes, 0.2, top - 0.15, text, weight="bold")
        draw_grid(axes, simulation.events, top, WIDE / simulation.makespan, "stage")
        draw_held(axes, 8.45, top, simulation.peak_in_flight)
        top += 1.85
    keys = (
        (0.85, BLUE, "forward (1 slot)"),
        (2.35, ORANGE, "backward (2 slots)"),
        (3.95, PALE[GREY], "idle"),
        (4.75, GREEN, "largest number of micro-batches that a stage holds"),
    )
    draw_keys(axes, 4.35, keys)
    return figure


def run(name: str) -> Simulation:
    """Simulate a schedule whose ranks each hold a quarter of the model."""
    schedule = build_schedule(name, STAGES, MICRO_BATCHES)
    parts = schedule.num_stages // schedule.num_ranks
    return simulate(schedule, forward=1 / parts, backward=2 / parts)


def schedules_split() -> Figure:
    names = ("interleaved", "zb-h1", "zb-h2", "zbv")
    return draw_runs("Four more schedules: 4 ranks, 8 micro-batches", names)


def schedules_several() -> Figure:
    names = ("interleaved-zb", "dualpipev")
    return draw_runs("Two more schedules with several stages: 4 ranks, 8 micro-batches", names)


def draw_runs(title: str, names: Sequence[str]) -> Figure:
    """The grid of every schedule, and what its ranks hold."""
    keys_at = 0.7 + 1.85 * len(names)
    figure, axes = canvas(10, keys_at + 0.25, title=title)
    runs = {name: run(name) for name in names}
    unit = WIDE / max(simulation.makespan for simulation in runs.values())
    top = 0.85
    for name, simulation in runs.items():
        text = (
            f"{name}: idle {percent(simulation.bubble)} of the step, "
            f"{percent(simulation.span_bubble)} of a rank's span"
        )
        write(axes, 0.2, top - 0.15, text, weight="bold")
        draw_grid(axes, simulation.events, top, unit, "rank")
        draw_held(axes, 8.45, top, simulation.peak_per_rank)
        top += 1.85
    keys = (
        (0.85, BLUE, "forward"),
        (1.75, ORANGE, "backward, or gradient of input"),
        (4.0, GREEN, "gradients of weights"),
        (5.62, PALE[GREY], "idle"),
    )
    draw_keys(axes, keys_at, keys)
    box(axes, 6.25, keys_at - 0.02, 0.2, 0.04, fill="black")
    write(axes, 6.52, keys_at, "on the second stage of the rank, half as long", size=8)
    return figure


if __name__ == "__main__":
    pictures = {
        "schedules": schedules,
        "schedules_split": schedules_split,
        "schedules_several": schedules_several,
    }
    save(pictures, __doc__)
