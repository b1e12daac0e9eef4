"""Draws docs/pictures/zoo.svg: what each checker finds, by the phase of the faults."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from benchmarks.zoo.fault import PHASES
from benchmarks.zoo.score import CHECKERS, Row
from docs.drawing.canvas import BLUE, box, canvas, GREEN, GREY, SOFT, STYLE, write

__all__ = ["PICTURE", "draw"]

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "zoo.svg"
KEYS = {
    "in the step where it begins": GREEN,
    "in a later step": BLUE,
    "not found": GREY,
}
LEFT, TOP, WIDTH, LINE, GAP = 1.15, 1.15, 1.5, 0.4, 0.1


def draw(rows: Sequence[Row]) -> None:
    """Draw what checkers have found."""
    title = f"{len(rows)} faults, by the phase in which they act, and who finds them"
    height = TOP + LINE * len(PHASES) + 0.35
    figure, axes = canvas(LEFT + (WIDTH + GAP) * len(CHECKERS) + 0.2, height, title=title)
    for number, (text, color) in enumerate(KEYS.items()):
        box(axes, LEFT + 2.1 * number, 0.52, 0.14, 0.14, fill=color)
        write(axes, LEFT + 2.1 * number + 0.2, 0.595, text, size=8)
    for column, (checker, name) in enumerate(CHECKERS.items()):
        x = LEFT + (WIDTH + GAP) * column
        write(axes, x, TOP - 0.15, name.replace("`", ""), size=8)
        for line, phase in enumerate(PHASES):
            of_phase = [row for row in rows if row.fault.phase == phase]
            at_once = sum(row.is_at_once(checker) for row in of_phase)
            ever = sum(row.found[checker] is not None for row in of_phase)
            counts = (at_once, ever - at_once, len(of_phase) - ever)
            y, start = TOP + LINE * line, x
            for count, color in zip(counts, KEYS.values(), strict=True):
                width = WIDTH * count / max(1, len(of_phase))
                box(axes, start, y, width, LINE - 0.12, fill=color)
                if count:
                    inside = {"ha": "center", "size": 7.5, "color": "white"}
                    write(axes, start + width / 2, y + (LINE - 0.12) / 2, str(count), **inside)
                start += width
    for line, phase in enumerate(PHASES):
        write(axes, 0.2, TOP + LINE * line + (LINE - 0.12) / 2, phase)
    said = "python -m benchmarks.zoo --picture; docs/zoo.md says what the phases are"
    write(axes, 0.2, height - 0.15, said, size=7.5, color=SOFT)
    with rc_context(STYLE):
        figure.savefig(PICTURE, metadata={"Date": None})
