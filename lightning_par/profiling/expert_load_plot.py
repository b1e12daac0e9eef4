"""Heat map of the load of every expert over a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_par.errors import ConfigurationError
from lightning_par.profiling.picture_file import check_picture_path, picture_file, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["draw_expert_load"]

_INCHES_PER_EXPERT, _MIN_BAND_INCHES = 0.09, 0.5


def draw_expert_load(
    loads: Mapping[str, Sequence[Sequence[float]]],
    steps: Sequence[int],
    path: str | Path,
    *,
    title: str,
) -> Path:
    """Draw one band per layer: experts from top to bottom, time to the right, color is the load.

    The load is relative to the mean of the layer at that time: 1 is balanced. Right of each band is
    the entropy of its last column, as a fraction of the largest possible entropy.

    Args:
        loads: Name of a layer -> for every time, the number of tokens assigned to each expert.
        steps: Optimizer step of every time.
        path: File to write; the suffix (.png, .svg or .pdf) says the format.
        title: Title of the picture.

    Returns:
        `path`.

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not one of the three, or
            there is nothing to draw.
    """
    path = check_picture_path(path)
    if not loads or not steps:
        raise ConfigurationError(
            "LP906",
            f"there is no load of experts to draw: it was recorded for {len(loads)} layers at "
            f"{len(steps)} steps. Train at least one step with the callback ExpertBalance.",
        )
    experts = len(next(iter(loads.values()))[0])
    height = 1.2 + len(loads) * max(_MIN_BAND_INCHES, _INCHES_PER_EXPERT * experts)
    with picture_file(path, (9.0, height), font=8) as figure:
        bands = figure.subplots(len(loads), sharex=True, squeeze=False)[:, 0]
        for axes, (name, times) in zip(bands, loads.items(), strict=True):
            image = _draw_band(axes, name, times)
        shown = range(0, len(steps), max(1, len(steps) // 8))
        bands[-1].set_xticks(list(shown), [str(steps[i]) for i in shown])
        bands[-1].set_xlabel("optimizer step; at the right: entropy at the end", color=TEXT_COLOR)
        bar = figure.colorbar(image, ax=list(bands), location="right", shrink=0.7, pad=0.06)
        bar.set_label("load / mean load", color=TEXT_COLOR)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=TEXT_COLOR)
    return path


def _draw_band(axes: "Axes", name: str, times: Sequence[Sequence[float]]) -> "AxesImage":
    columns = [_relative(time) for time in times]
    image = axes.imshow(
        [list(row) for row in zip(*columns, strict=True)],
        aspect="auto",
        interpolation="nearest",
        cmap="RdYlBu_r",  # diverging, and 0 .. 2 puts a balanced load (1) at its neutral middle
        vmin=0,
        vmax=2,
    )
    axes.set_yticks([])
    axes.set_ylabel(name, rotation=0, ha="right", va="center", color=TEXT_COLOR)
    entropy = f"{_normalized_entropy(times[-1]):.3f}"
    axes.text(1.01, 0.5, entropy, transform=axes.transAxes, va="center", color=TEXT_COLOR)
    axes.tick_params(length=0, colors=TEXT_COLOR)
    return image


def _relative(load: Sequence[float]) -> list[float]:
    mean = sum(load) / len(load)
    return [value / mean if mean else 1.0 for value in load]


def _normalized_entropy(load: Sequence[float]) -> float:
    """Return the entropy of the load over that of a balanced load, 0 .. 1; 1 with one expert."""
    total = sum(load)
    shares = [value / total for value in load if value]
    if len(load) == 1 or not shares:
        return 1.0
    return -sum(s * math.log(s) for s in shares) / math.log(len(load))
