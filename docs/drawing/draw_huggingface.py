"""Draws what every rank holds of a Hugging Face model, from what `lightning-par plan` computes.

python docs/drawing/draw_huggingface.py            writes docs/pictures/*.svg
python docs/drawing/draw_huggingface.py --out DIR --suffix .png
"""

from collections.abc import Callable
from math import prod

import torch
from canvas import BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.figure import Figure
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_par import check_plan, ParallelSizes
from lightning_par.engine.memory.placement import find_placements, ParameterPlacement
from lightning_par.inference.lookup import find_plan

SIZES = ParallelSizes(tensor=2, pipeline=2, data_shard=2)


def holdings() -> list[ParameterPlacement]:
    """A Mixtral of two blocks on eight ranks."""
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    plan = find_plan(model)
    assert plan is not None
    layout = check_plan(model, plan, SIZES)
    return find_placements(model, layout, SIZES, rank_of_stage=(0, 1))


def huggingface() -> Figure:
    rows = holdings()
    figure, axes = canvas(10, 7.9, title="A Mixtral of transformers: 8 ranks, tp 2 x pp 2 x dp 2")
    left, top, cell, height = 3.0, 1.05, 0.56, 0.24
    for rank in range(SIZES.world_size):
        place, x = SIZES.coordinates(rank), left + (rank + 0.5) * cell
        write(axes, x, top - 0.32, f"rank {rank}", ha="center", size=8, weight="bold")
        words = f"pp {place['pp']} tp {place['tp']}"
        write(axes, x, top - 0.12, words, ha="center", size=6.5, color=SOFT)
    for line, row in enumerate(rows):
        y = top + line * 0.285
        name = row.name.removeprefix("model.").removesuffix(".weight")
        write(axes, 0.2, y + height / 2, name, size=8)
        for rank in range(SIZES.world_size):
            shape = row.local_shape(rank, SIZES)
            axis = {cut.axis for cut in row.cuts}
            color = "white"
            if shape is not None:
                color = BLUE if "tp" in axis else PALE[ORANGE]
            box(axes, left + rank * cell, y, cell - 0.05, height, fill=color, edge=GREY)
            if shape is not None:
                share = f"1/{prod(row.shape) // prod(shape)}"
                ink = "white" if color == BLUE else "black"
                x = left + (rank + 0.5) * cell - 0.025
                write(axes, x, y + height / 2, share, ha="center", size=7, color=ink)
        cut = next((c for c in row.cuts if c.axis == "tp"), None)
        reason = row.reason.partition(":")[0] if cut is None else f"dim {cut.dim} by tp"
        x = left + 8 * cell + 0.1
        write(axes, x, y + height / 2, reason, size=7.5, color=GREEN if cut else SOFT)
    notes = (
        "The share of each parameter that a rank holds, as `lightning-par plan` prints it. Blue: "
        "divided by tensor parallelism, and by ZeRO over the\nreplicas. Orange: divided by ZeRO "
        "only; the right column says why it is whole within a replica. A stage holds only its own "
        "blocks."
    )
    write(axes, 0.2, top + len(rows) * 0.285 + 0.35, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"huggingface": huggingface}

if __name__ == "__main__":
    save(PICTURES, __doc__)
