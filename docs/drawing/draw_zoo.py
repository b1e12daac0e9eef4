"""Draws what each checker finds of the zoo's faults, from benchmarks/zoo/found.json, which
``python -m benchmarks.zoo --report`` writes; the options are those of draw.py.
"""

import json
from pathlib import Path

from canvas import BLUE, box, canvas, GREEN, GREY, save, SOFT, write
from matplotlib.figure import Figure

REPORT = Path(__file__).parents[2] / "benchmarks" / "zoo" / "found.json"
KEYS = {
    "in the step where it begins": GREEN,
    "in a later step": BLUE,
    "not found": GREY,
}
LEFT, TOP, WIDTH, LINE, GAP = 1.0, 1.15, 1.5, 0.4, 0.12


def zoo() -> Figure:
    found = json.loads(REPORT.read_text())
    checkers, phases = found["checkers"], found["phases"]
    count = sum(phase["faults"] for phase in phases.values())
    title = f"{count} faults, by the phase in which they act, and who finds them"
    height = TOP + LINE * len(phases) + 0.1
    figure, axes = canvas(LEFT + (WIDTH + GAP) * len(checkers) + 0.1, height, title=title)
    for number, (text, color) in enumerate(KEYS.items()):
        box(axes, LEFT + 2.1 * number, 0.52, 0.14, 0.14, fill=color)
        write(axes, LEFT + 2.1 * number + 0.2, 0.595, text, size=8)
    for column, (checker, name) in enumerate(checkers.items()):
        x = LEFT + (WIDTH + GAP) * column
        write(axes, x, TOP - 0.15, name.replace("`", ""), size=7.5, color=SOFT)
        for line, phase in enumerate(phases.values()):
            at_once, later = phase[checker]
            counts = at_once, later, phase["faults"] - at_once - later
            start, y, high = x, TOP + LINE * line, LINE - 0.12
            for number, color in zip(counts, KEYS.values(), strict=True):
                wide = WIDTH * number / phase["faults"]
                box(axes, start, y, wide, high, fill=color)
                if number:
                    at = start + wide / 2, y + high / 2
                    size = 7.5 if wide > 0.1 else 6
                    write(axes, *at, str(number), ha="center", size=size, color="white")
                start += wide
    for line, phase in enumerate(phases):
        write(axes, 0.2, TOP + LINE * line + (LINE - 0.12) / 2, phase)
    return figure


if __name__ == "__main__":
    save({"zoo": zoo}, __doc__)
