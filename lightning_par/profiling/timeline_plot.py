"""Timeline plot of a pipeline, simulated or measured: one row per rank, one box per action."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Literal, TYPE_CHECKING

from lightning_par.engine.pipeline.actions import ActionKind, TimedAction
from lightning_par.engine.pipeline.simulator import bubble_fraction
from lightning_par.errors import ScheduleError
from lightning_par.profiling.picture_file import check_picture_path, picture_file, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_timeline", "plot_timeline", "timeline_height"]

_BOX_HEIGHT = 0.78
_INCHES_PER_ROW = 0.5
_LARGEST_FONT, _SMALLEST_FONT = 8.0, 4.0
_DIGIT_WIDTH = 0.64
"""Width of a digit, as a fraction of the font size."""
_LABELS: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.BACKWARD_INPUT: "backward, input",
        ActionKind.BACKWARD_WEIGHT: "backward, weights",
    }
)
_COLORS: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "#3b76af",
        ActionKind.BACKWARD: "#e08a2e",
        ActionKind.BACKWARD_INPUT: "#e08a2e",
        ActionKind.BACKWARD_WEIGHT: "#5b9b57",
    }
)
_IDLE_COLOR = "#e9ebee"


def draw_timeline(
    events_per_rank: Sequence[Sequence[TimedAction]],
    path: str | Path,
    *,
    title: str,
    unit: Literal["ms", "slots"] = "ms",
    width: float = 11.0,
    labels: Sequence[str] | None = None,
) -> Path:
    """Draw one row per rank and one box per action, labeled with its micro-batch; grey is idle.

    Args:
        events_per_rank: Timed actions of each rank, on one clock: `Simulation.events`, or measured
            ones, in seconds.
        path: File to write; the suffix (.png, .svg or .pdf) says the format.
        title: First words of the title; the bubble, as `bubble_fraction` defines it, follows.
        unit: "ms" if the times are seconds, "slots" if they are units of the simulator.
        width: Width of the picture in inches.
        labels: A name per rank; None: the stages that each rank ran.

    Returns:
        `path`.

    Raises:
        ConfigurationError: matplotlib is not installed, or the suffix is not one of the three.
        ScheduleError: There is no event to draw, or there is not one label per rank.
    """
    path = check_picture_path(path)
    _check(events_per_rank, labels)
    with picture_file(path, (width, timeline_height(len(events_per_rank))), font=9) as figure:
        axes = figure.add_subplot()
        plot_timeline(axes, events_per_rank, title=title, unit=unit, width=width, labels=labels)
    return path


def timeline_height(ranks: int) -> float:
    """Return the height in inches of a timeline of that many ranks."""
    return 1.35 + _INCHES_PER_ROW * ranks


def plot_timeline(
    axes: "Axes",
    events_per_rank: Sequence[Sequence[TimedAction]],
    *,
    title: str,
    unit: Literal["ms", "slots"],
    width: float,
    labels: Sequence[str] | None = None,
) -> None:
    """Draw what `draw_timeline` draws as a part of a larger picture.

    Args:
        axes: Where to draw.
        events_per_rank: As for `draw_timeline`, at least one event; the others likewise.
        title: First words of the title.
        unit: Of the times.
        width: Of the picture in inches.
        labels: A name per rank.
    """
    origin = min(event.start for row in events_per_rank for event in row)
    span = max(event.end for row in events_per_rank for event in row) - origin
    scale = 1e3 if unit == "ms" else 1.0
    # 72 points to the inch; about 0.92 of the width is left to the axes.
    _draw_boxes(axes, events_per_rank, origin, scale, width * 72 * 0.92 / (span * scale or 1))
    _draw_frame(axes, labels or _stage_labels(events_per_rank), span * scale, unit)
    bubble = f"{bubble_fraction(events_per_rank):.1%}".replace("%", " %")
    axes.set_title(f"{title}, bubble {bubble}", loc="left", fontsize=11, color=TEXT_COLOR)


def _check(events_per_rank: Sequence[Sequence[TimedAction]], labels: Sequence[str] | None) -> None:
    if not any(events_per_rank):
        raise ScheduleError(
            "LP906",
            "the timeline of the pipeline is empty, so there is nothing to draw. Run or "
            "simulate at least one action of a schedule.",
        )
    if labels is not None and len(labels) != len(events_per_rank):
        raise ScheduleError(
            "LP906",
            f"labels= has {len(labels)} entries, but the timeline has {len(events_per_rank)} "
            "ranks. Pass one label for each rank.",
        )


def _stage_labels(events_per_rank: Sequence[Sequence[TimedAction]]) -> list[str]:
    labels = []
    for rank, row in enumerate(events_per_rank):
        stages = sorted({event.action.stage for event in row})
        word = "stage" if len(stages) == 1 else "stages"
        labels.append(f"{word} {', '.join(map(str, stages))}" if stages else f"rank {rank}")
    return labels


def _draw_boxes(
    axes: "Axes",
    events_per_rank: Sequence[Sequence[TimedAction]],
    origin: float,
    scale: float,
    points_per_unit: float,
) -> None:
    """Draw one box per action, with the number of its micro-batch where it fits."""
    fonts = _font_sizes(events_per_rank, scale * points_per_unit)
    seen: set[ActionKind] = set()
    for rank, row in enumerate(events_per_rank):
        for event in row:
            kind, number = event.action.kind, str(event.action.microbatch)
            start, length = (event.start - origin) * scale, (event.end - event.start) * scale
            axes.barh(
                rank,
                length,
                left=start,
                height=_BOX_HEIGHT,
                color=_COLORS[kind],
                edgecolor="white",
                # A full-width edge would hide a narrow box.
                linewidth=min(0.8, 0.1 * length * points_per_unit),
                # One legend entry per kind, not per box.
                label=None if kind in seen else _LABELS[kind],
            )
            seen.add(kind)
            font = fonts.get(kind, 0.0)
            if font and length * points_per_unit >= _DIGIT_WIDTH * font * len(number):
                axes.text(
                    start + length / 2,
                    rank,
                    number,
                    ha="center",
                    va="center_baseline",
                    color="white",
                    fontsize=font,
                )


def _font_sizes(
    events_per_rank: Sequence[Sequence[TimedAction]], points_per_time: float
) -> dict[ActionKind, float]:
    """Return per kind the font size at which its numbers fit its median box.

    A kind whose numbers would be too small to read has no entry.
    """
    sizes = {}
    for kind in ActionKind:
        events = [event for row in events_per_rank for event in row if event.action.kind is kind]
        if events:
            digits = max(len(str(event.action.microbatch)) for event in events)
            box = median(event.end - event.start for event in events) * points_per_time
            size = min(_LARGEST_FONT, box / (1.25 * _DIGIT_WIDTH * digits))
            if size >= _SMALLEST_FONT:
                sizes[kind] = size
    return sizes


def _draw_frame(axes: "Axes", labels: Sequence[str], span: float, unit: str) -> None:
    """Draw the idle background, the axes and the legend."""
    axes.barh(
        range(len(labels)), span, height=_BOX_HEIGHT, color=_IDLE_COLOR, zorder=0, label="idle"
    )
    axes.set_xlim(0, span or 1)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("time (ms)" if unit == "ms" else "time (slots)", color=TEXT_COLOR)
    axes.tick_params(length=0, colors=TEXT_COLOR)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=5,
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        handleheight=0.9,
        borderaxespad=0.3,
    )
