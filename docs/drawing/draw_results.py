"""Draws what a slow link between two hosts adds to a step, and how far islands are behind replicas
in step, from tables in RESULTS.md; the options are those of draw.py.
"""

import re
from pathlib import Path

from canvas import BLUE, box, canvas, GREEN, GREY, INK, ORANGE, save, SOFT, write
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"
SCALE = 2.4 / 1000  # inches for a millisecond


def measured() -> list[tuple[str, int, int]]:
    """Layout, the fastest step without limits and that over the link, in ms."""
    table = RESULTS.read_text().split("| layout | fastest step, ms | over the link |")[1]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|", table.split("\n\n")[0], re.MULTILINE)
    return [(layout, int(without), int(over)) for layout, without, over in rows]


def hosts() -> Figure:
    rows, left, top = measured(), 2.75, 0.95
    title = "Time of a step on two hosts, by what is divided between them"
    figure, axes = canvas(9.2, top + 0.55 * len(rows) + 0.35, title=title)
    keys = ((GREY, "on a link without a limit"), (ORANGE, "added by 1 Gbit/s and 1 ms"))
    for number, (color, text) in enumerate(keys):
        box(axes, left + 2.2 * number, 0.56, 0.14, 0.14, fill=color)
        write(axes, left + 2.2 * number + 0.2, 0.635, text, size=8)
    for number, (layout, without, over) in enumerate(rows):
        y = top + 0.55 * number
        write(axes, 0.2, y + 0.15, layout)
        box(axes, left, y, without * SCALE, 0.3, fill=GREY)
        box(axes, left + without * SCALE, y, (over - without) * SCALE, 0.3, fill=ORANGE)
        write(axes, left + over * SCALE + 0.08, y + 0.15, f"+ {over - without} ms", size=8)
    said = "A GPT of 3.2 million parameters, 8 x 256 tokens, gloo; the fastest of 15 steps"
    write(axes, 0.2, top + 0.55 * len(rows) + 0.1, said, size=7.5, color=SOFT)
    return figure


def behind() -> dict[str, list[tuple[int, float]]]:
    """What is added to ``every=N`` -> N and the nats behind the run in step of the same seed."""
    table = RESULTS.read_text().split("| run (after `steps=500,`) | seed 0 |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `every=(\d+)([^`]*)`[^|]*\| (.*) \|[^|]*\|$", table, re.MULTILINE)
    losses = [(int(every), added, cells.split("|")) for every, added, cells in rows]
    in_step = next(cells for every, _, cells in losses if not every)
    found: dict[str, list[tuple[int, float]]] = {}
    for every, added, cells in losses:
        for cell, reached in zip(cells, in_step, strict=True):
            if every and cell.strip():
                found.setdefault(added, []).append((every, float(cell) - float(reached)))
    return found


def islands() -> Figure:
    found = behind()
    title = "Four islands and 1 million tokens: loss above synchronous replicas"
    figure, axes = canvas(9.2, 3.9, title=title)
    plot = figure.add_axes((0.075, 0.15, 0.5, 0.7))
    kinds = {
        "": (ORANGE, "Nesterov 0.7, 0.9"),
        ",optimizer=average": (BLUE, "average"),
        ",optimizer=average,first=125": (GREEN, "average, first quarter synchronous"),
    }
    for number, (added, (color, text)) in enumerate(kinds.items()):
        points = found[added]
        steps = sorted({every for every, _ in points})
        means = [
            sum(b for e, b in points if e == s) / sum(e == s for e, _ in points) for s in steps
        ]
        plot.plot(steps, means, color=color, lw=1.4)
        plot.plot(*zip(*points, strict=True), "o", color=color, ms=4.5)
        box(axes, 5.6, 1.0 + 0.3 * number, 0.14, 0.14, fill=color)
        write(axes, 5.82, 1.075 + 0.3 * number, text, size=8.5)
    plot.set_xscale("log")
    plot.set_xticks([1, 4, 8, 30], ["1", "4", "8", "30"])
    plot.minorticks_off()
    plot.set_ylim(0, 1)
    plot.set_xlabel("steps between two exchanges (every)", fontsize=8.5, color=INK)
    plot.tick_params(labelsize=8, colors=INK)
    plot.grid(axis="y", color=GREY, alpha=0.35, lw=0.6)
    for side in ("top", "right"):
        plot.spines[side].set_visible(False)
    said = (
        "Difference of the loss on held-out text, in nats; a GPT\n"
        "of 177 thousand parameters, one point for each seed"
    )
    write(axes, 5.6, 2.2, said, size=7.5, color=SOFT)
    return figure


if __name__ == "__main__":
    save({"hosts": hosts, "islands": islands}, __doc__)
