"""Draws the pictures of BERT and of the mixtures of experts, from what the models compute.

python docs/drawing/draw_models.py            writes docs/pictures/*.svg
python docs/drawing/draw_models.py --out DIR --suffix .png
"""

from collections.abc import Callable

import torch
from canvas import arrow, BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.figure import Figure

from lightning_par.models import MixtralConfig
from lightning_par.models.bert.masking import IGNORED, mask_tokens
from lightning_par.models.mixtral.moe import Router

RANKS, EXPERTS, TOKENS, DIM = 2, 4, 7, 12
COLORS = (BLUE, ORANGE)


def routes() -> list[list[tuple[int, int]]]:
    """What a new router chooses: for every rank, pairs of a token and an expert."""
    torch.manual_seed(1)
    router = Router(MixtralConfig(num_experts=EXPERTS, model_dim=DIM, num_heads=3))
    found = []
    for hidden in torch.randn(RANKS, 1, TOKENS, DIM):
        routed = router(hidden)
        experts = torch.arange(EXPERTS).repeat_interleave(routed.counts)
        found.append(list(zip(routed.tokens.tolist(), experts.tolist(), strict=True)))
    return found


def experts() -> Figure:
    figure, axes = canvas(10, 4.9, title="Two ranks, ep 2: tokens travel to their experts")
    chosen, own = routes(), EXPERTS // RANKS
    left, middle, step = 1.6, 5.6, 0.235
    places = {}
    for expert in range(EXPERTS):
        rank = expert // own
        y = 0.95 + 0.87 * expert + 0.1 * rank
        count = sum(e == expert for pairs in chosen for _, e in pairs)
        box(axes, middle, y, 2.9, 0.6, fill=PALE[COLORS[rank]])
        write(axes, middle + 0.12, y + 0.2, f"expert {expert}", weight="bold")
        write(axes, middle + 0.12, y + 0.42, f"rank {rank}", size=7.5, color=COLORS[rank])
        rows = 0
        for source, pairs in enumerate(chosen):
            for _ in (pair for pair in pairs if pair[1] == expert):
                box(axes, middle + 0.95 + 0.17 * rows, y + 0.2, 0.14, 0.2, fill=COLORS[source])
                rows += 1
        write(axes, middle + 3.05, y + 0.3, f"{count} rows", size=8)
        places[expert] = y + 0.3
    leaving = 0
    for rank, pairs in enumerate(chosen):
        top = 0.95 + rank * 1.84
        write(axes, 0.2, top + 0.75, f"rank {rank}", weight="bold", color=COLORS[rank])
        write(axes, 0.2, top + 0.95, "its own samples", size=7.5, color=SOFT)
        for token in range(TOKENS):
            y = top + step * token
            box(axes, left, y, 0.5, 0.18, fill=COLORS[rank])
            write(axes, left + 0.25, y + 0.09, str(token), ha="center", size=6.5, color="white")
        for token, expert in pairs:
            crosses = expert // own != rank
            leaving += crosses
            color = GREEN if crosses else GREY
            start = (left + 0.55, top + step * token + 0.09)
            arrow(axes, start, (middle - 0.05, places[expert]), color)
    total = RANKS * TOKENS * 2
    notes = (
        f"A router with random weights chose 2 of {EXPERTS} experts for each of {TOKENS} random "
        f"tokens of each rank. Green: {leaving} of {total} rows are sent to\nthe other rank, and "
        "their results are sent back; gradients take the same ways. A rank computes its experts "
        "for the rows of all ranks."
    )
    write(axes, 0.2, 4.65, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


def hidden_tokens() -> Figure:
    figure, axes = canvas(10, 3.6, title="BERT: the hidden tokens depend on the text and the step")
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 200, (4, 28), generator=draw)
    lengths = torch.tensor([28, 21, 25, 14])
    maskable = torch.arange(28)[None] < lengths[:, None]
    size = 0.145
    for column, step in enumerate((0, 1)):
        shown, labels = mask_tokens(tokens, maskable, step=step, mask_id=200, vocab_size=200)
        chosen = labels != IGNORED
        left = 0.75 + column * 4.6
        write(axes, left, 0.75, f"step {step}", weight="bold")
        for row in range(4):
            y = 0.95 + row * 0.38 + (0.22 if row > 1 else 0)
            if not column:
                write(axes, 0.2, y + size / 2, f"text {row}", size=7.5, color=SOFT)
            for place in range(28):
                color = PALE[GREY] if maskable[row, place] else "white"
                if chosen[row, place]:
                    kept = shown[row, place] == tokens[row, place]
                    color = GREEN if kept else ORANGE
                    color = BLUE if shown[row, place] == 200 else color
                box(axes, left + place * size, y, size, 0.24, fill=color, edge=GREY)
    x = 0.75
    for text, color, wide in (
        ("the mask token", BLUE, 1.3),
        ("another token", ORANGE, 1.25),
        ("unchanged, but predicted", GREEN, 1.8),
        ("not chosen", PALE[GREY], 1.05),
        ("padding", "white", 1.0),
    ):
        box(axes, x, 2.83, 0.14, 0.14, fill=color, edge=GREY)
        write(axes, x + 0.2, 2.9, text, size=7.5)
        x += wide
    notes = (
        "The choice is a hash of the tokens of the text, the step and the position. So two "
        "replicas with two texts each, or two micro-batches,\n"
        "hide the same tokens as one process with all four texts."
    )
    write(axes, 0.2, 3.25, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"experts": experts, "hidden_tokens": hidden_tokens}


if __name__ == "__main__":
    save(PICTURES, __doc__)
