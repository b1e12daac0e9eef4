"""Shapes and text on a figure whose unit is the inch; colors that color-blind eyes tell apart."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PALE",
    "SOFT",
    "arrow",
    "box",
    "canvas",
    "heat",
    "save",
    "write",
]

BLUE, ORANGE, GREEN, GREY = "#3b76af", "#e08a2e", "#3f8f6b", "#9aa1ab"
PALE = {BLUE: "#d3e1ef", ORANGE: "#f8e0c5", GREEN: "#d2e8de", GREY: "#eceef1"}
INK, SOFT = "#2b2f36", "#6a717c"
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "lightning-par", "font.size": 9}


def canvas(width: float, height: float, *, title: str) -> tuple[Figure, Axes]:
    """A white figure whose units are inches, with the origin at the top left."""
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    write(axes, 0.2, 0.28, title, size=12, weight="bold")
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, **options: object) -> None:
    """Text at a place; left-aligned and centred on the line unless said otherwise."""
    size, color = options.pop("size", 9), options.pop("color", INK)
    given = {"ha": "left", "va": "center", "fontsize": size, "color": color, **options}
    axes.text(x, y, text, **given)


def box(
    axes: Axes, x: float, y: float, w: float, h: float, *, fill: str = "white", edge: str = "white"
) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, linewidth=0.8))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=color, lw=1.2, shrinkA=0
        )
    )


def heat(axes: Axes, values: Tensor, x: float, y: float, size: float) -> None:
    """A square cell per value; blue is negative, orange is positive."""
    for i, line in enumerate(values.tolist()):
        for j, value in enumerate(line):
            strength = min(1.0, abs(value) / 0.04)
            base = (0.88, 0.54, 0.18) if value > 0 else (0.23, 0.46, 0.69)
            mixed = tuple(1 - strength * (1 - part) for part in base)
            patch = Rectangle((x + j * size, y + i * size), size, size, facecolor=mixed, lw=0)
            axes.add_patch(patch)
    rows, columns = values.shape
    frame = Rectangle(
        (x, y), columns * size, rows * size, fill=False, edgecolor=GREY, linewidth=0.8
    )
    axes.add_patch(frame)


def save(pictures: Mapping[str, Callable[[], Figure]], description: str) -> argparse.Namespace:
    """Draw every picture to a file of its name, where the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "pictures")
    parser.add_argument("--suffix", default=".svg", choices=[".svg", ".png", ".pdf"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures.items():
        with rc_context(STYLE):
            metadata = {"Date": None} if options.suffix == ".svg" else None
            path = options.out / f"{name}{options.suffix}"
            draw().savefig(path, metadata=metadata)
            print(path)
    return options
