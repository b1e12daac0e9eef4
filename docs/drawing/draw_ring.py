"""Draws who sends what to whom in a ring, from the engine's schedule; options as in draw.py."""

from canvas import BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lightning_par.engine.context.ring_schedule import (
    ring_steps,
    RingSchedule,
    RingStep,
    TokenLayout,
    Transfer,
)

RANKS, CHUNK = 4, 2  # tokens of a chunk, so that the diagonal shows
COLORS = (BLUE, ORANGE, GREEN, GREY)
CORNERS = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
LAYOUT = TokenLayout(length=2 * RANKS * CHUNK, ring=RANKS)
CELL = 0.115


def tokens(member: int) -> list[int]:
    return [t for a, b in LAYOUT.of_member(member) for t in range(a, b)]


def draw_pairs(axes: Axes, left: float, top: float, steps: list[RingStep]) -> None:
    """A square of all pairs of tokens; those of this step in the color of the rank that computes
    them.
    """
    size = LAYOUT.length * CELL
    box(axes, left, top, size, size, fill=PALE[GREY])
    for rank, step in enumerate(steps):
        queries, keys = tokens(rank), tokens(step.owner)
        for block in step.blocks:
            for i in range(*block.queries):
                stop = i + 1 if block.causal else block.keys[1]
                for j in range(block.keys[0], stop):
                    x, y = left + keys[j] * CELL, top + queries[i] * CELL
                    box(axes, x, y, CELL, CELL, fill=COLORS[rank])


def draw_messages(
    axes: Axes, left: float, top: float, messages: list[tuple[int, Transfer]]
) -> None:
    """The ranks on a square, and an arrow for every message: thick for all tokens of a rank."""
    side = 1.25
    places = [(left + x * side, top + y * side) for x, y in CORNERS]
    for sender, message in messages:
        patch = FancyArrowPatch(
            places[sender],
            places[message.peer],
            arrowstyle="-|>",
            connectionstyle="arc3,rad=0.16",
            mutation_scale=9,
            shrinkA=11,
            shrinkB=11,
            lw=2.2 if message.tokens == LAYOUT.local else 1.0,
            color=COLORS[message.owner],
        )
        axes.add_patch(patch)
    for rank, (x, y) in enumerate(places):
        box(axes, x - 0.14, y - 0.14, 0.28, 0.28, fill=COLORS[rank])
        write(axes, x, y, str(rank), ha="center", color="white", weight="bold")


def draw_layout(axes: Axes, left: float, top: float) -> None:
    write(axes, 0.2, top + 0.12, "tokens", weight="bold", size=8.5)
    for rank in range(RANKS):
        for chunk in tokens(rank)[::CHUNK]:
            x, wide = left + chunk * 2 * CELL, CHUNK * 2 * CELL
            box(axes, x, top, wide, 0.24, fill=COLORS[rank])
            write(axes, x + wide / 2, top + 0.12, f"{rank}", ha="center", size=8, color="white")
    text = "Rank r holds chunks r and 2N - 1 - r: every rank has the same work."
    write(axes, left + LAYOUT.length * 2 * CELL + 0.2, top + 0.12, text, size=8, color=SOFT)


def sequence_ring() -> Figure:
    figure, axes = canvas(10, 6.1, title="Causal attention over 4 ranks: who sends what to whom")
    schedule = RingSchedule(layout=LAYOUT, causal=True)
    steps = [ring_steps(schedule, rank) for rank in range(RANKS)]
    draw_layout(axes, 1.05, 0.6)
    left, wide = 1.05, 2.25
    rows = {"queries": 1.25, "sent": 3.85}
    write(axes, 0.2, 2.15, "who attends", weight="bold", size=8.5)
    write(axes, 0.2, 2.33, "rows: queries", size=7.5, color=SOFT)
    write(axes, 0.2, 2.49, "columns: keys", size=7.5, color=SOFT)
    write(axes, 0.2, 4.3, "who sends", weight="bold", size=8.5)
    write(axes, 0.2, 4.48, "thick: all", size=7.5, color=SOFT)
    write(axes, 0.2, 4.64, "thin: only the", size=7.5, color=SOFT)
    write(axes, 0.2, 4.80, "first chunk", size=7.5, color=SOFT)
    for index in range(RANKS):
        x, now = left + index * wide, [row[index] for row in steps]
        write(axes, x, rows["queries"] - 0.14, f"step {index}", weight="bold", size=8.5)
        draw_pairs(axes, x, rows["queries"], now)
        messages = [(rank, s.send) for rank, s in enumerate(now) if s.send is not None]
        if messages:
            draw_messages(axes, x + 0.3, rows["sent"] - 0.1, messages)
        else:
            write(axes, x, 4.4, "nothing: own tokens", size=8, color=SOFT)
    sent = [schedule.tokens_sent(rank) for rank in range(RANKS)]
    unit = LAYOUT.local * RANKS
    forward, gradients = sum(v for v, _ in sent) / unit, sum(g for _, g in sent) / unit
    notes = (
        "M is the size of the keys and values of one rank. Each rank sends on average "
        f"{forward:g} M in the forward, and {forward:g} M again in the backward.\n"
        f"Their gradients are sent directly back, against the arrows: {gradients:g} M. "
        f"Together {2 * forward + gradients:g} M = 2.25 (N-1) M. Sending overlaps with computing."
    )
    write(axes, 0.2, 5.75, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


if __name__ == "__main__":
    save({"sequence_ring": sequence_ring}, __doc__)
