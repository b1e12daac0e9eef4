"""Picture of a predicted layout: its pipeline, and where time and memory go."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_par.planner.search import Candidate, Planner
from lightning_par.profiling.picture_file import check_picture_path, picture_file, TEXT_COLOR
from lightning_par.profiling.timeline_plot import plot_timeline, timeline_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_candidate"]

_WIDTH, _BARS_HEIGHT = 11.0, 3.2
"""Inches: of the picture, and of the bars of time and memory."""
_COLORS = ("#3b76af", "#e08a2e", "#5b9b57", "#b5534e", "#7d64a8", "#8c6d5a", "#6b7785", "#c9a227")
_GIB = 2**30


def draw_candidate(planner: Planner, one: Candidate, path: str | Path) -> Path:
    """Draw the pipeline with the predicted times of its stages, if there is one; the parts of the
    step's time; and the bytes of every pipeline rank by kind, with those that a layout may take.

    Args:
        planner: What predicted the layout.
        one: The layout.
        path: File to write; the suffix (.png, .svg or .pdf) says the format.

    Returns:
        `path`.

    Raises:
        ConfigurationError: matplotlib is not installed, or the suffix is not one of the three.
    """
    path, ranks = check_picture_path(path), one.layout.sizes.pipeline
    heights = [*([timeline_height(ranks)] if ranks > 1 else []), _BARS_HEIGHT]
    with picture_file(path, (_WIDTH, sum(heights) + 0.5), font=9) as figure:
        figure.suptitle(
            f"{one.layout}\n{one.time.seconds:.4g} s a step, "
            f"{one.tokens_per_second:,.0f} tokens/s, MFU {one.mfu:.1%}, "
            f"on {one.layout.sizes.world_size} x {planner.device.name}",
            fontsize=10,
            color=TEXT_COLOR,
        )
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        if ranks > 1:
            title = f"{one.layout.schedule}, {one.layout.microbatches} micro-batches"
            events = planner.timeline(one.layout)
            plot_timeline(
                figure.add_subplot(grid[0, :]), events, title=title, unit="ms", width=_WIDTH
            )
        _plot_time(figure.add_subplot(grid[-1, 0]), one)
        _plot_memory(figure.add_subplot(grid[-1, 1]), one, planner.limit)
    return path


def _plot_time(axes: "Axes", one: Candidate) -> None:
    parts = {name: seconds for name, seconds in one.time.parts.items() if seconds > 0}
    bars = axes.barh(list(parts), list(parts.values()), color=_COLORS[0])
    shares = [f"{seconds / one.time.seconds:.1%}" for seconds in parts.values()]
    axes.bar_label(bars, shares, padding=3, color=TEXT_COLOR)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    _finish(axes, "time of a step (s)")


def _plot_memory(axes: "Axes", one: Candidate, limit: float) -> None:
    ranks: Sequence[int] = range(len(one.memory.ranks))
    starts = [0.0] * len(ranks)
    kinds = {name: None for rank in one.memory.ranks for name in rank}  # in order, each once
    for name, color in zip(kinds, cycle(_COLORS), strict=False):
        sizes = [rank.get(name, 0.0) / _GIB for rank in one.memory.ranks]
        if any(sizes):
            axes.barh(ranks, sizes, left=starts, color=color, label=name)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.axvline(limit / _GIB, color=TEXT_COLOR, linestyle="--", linewidth=1, label="may be taken")
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _finish(axes, "memory of every pipeline rank (GiB)")


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=TEXT_COLOR)
    axes.tick_params(length=0, colors=TEXT_COLOR)
    axes.spines[["top", "right", "left"]].set_visible(False)
