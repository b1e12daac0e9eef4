"""Draws what a slow link between two hosts adds to a step, from the table in RESULTS.md; the
options are those of draw.py.
"""

import re
from pathlib import Path

from canvas import box, canvas, GREY, ORANGE, save, SOFT, write
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
    title = "A step on two hosts, by what is divided between them"
    figure, axes = canvas(9.2, top + 0.55 * len(rows) + 0.35, title=title)
    keys = ((GREY, "no limit between the hosts"), (ORANGE, "1 Gbit/s, 1 ms: what the link adds"))
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


if __name__ == "__main__":
    save({"hosts": hosts}, __doc__)
