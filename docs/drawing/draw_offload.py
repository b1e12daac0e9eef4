"""Draws what a rank holds with and without offloading; the options are those of draw.py."""

from typing import Any

import torch
from canvas import BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.figure import Figure
from torch import nn

from lightning_par.engine.memory.estimate import estimate_memory, MemoryEstimate
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import resolve_plan
from lightning_par.sizes import ParallelSizes

RANKS, BLOCKS, WIDTH = 4, 32, 4096
SCALE = 0.075  # inches of a GiB
COLORS = {"parameters": BLUE, "gathered": GREY, "gradients": ORANGE, "optimizer": GREEN}


class Blocks(nn.Module):
    """The matrices of a GPT's blocks, 12 D^2 each, on meta."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.Linear(WIDTH, 12 * WIDTH, bias=False) for _ in range(BLOCKS)
            )


def estimate(stage: int, offload: dict[str, Any] | None) -> MemoryEstimate:
    """Ask the engine."""
    model = Blocks()
    return estimate_memory(
        model,
        resolve_plan(model, ParallelPlan(blocks="blocks")),
        ParallelSizes(data_shard=RANKS),
        zero_stage=stage,
        offload=None if offload is None else OffloadOptions(**offload),
        dtype=torch.bfloat16,
    )


ROWS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "hybrid3d, zero_stage=2": (2, None),
    "zero_offload, stage=2": (2, {}),
    "delayed_update=0": (2, {"delayed_update": 0}),
    "stage=3": (3, {}),
    "stage=3, offload_parameters": (3, {"offload_parameters": True}),
}


def offload() -> Figure:
    figure, axes = canvas(10, 4.1, title="What one rank holds, on its device and in CPU memory")
    left, right, top = 2.35, 5.6, 1.15
    write(axes, left, 0.8, "device", weight="bold")
    write(axes, right, 0.8, "CPU memory", weight="bold")
    for name, (stage, options) in ROWS.items():
        found = estimate(stage, options)
        write(axes, 0.2, top + 0.2, name)
        for start, side in ((left, "device"), (right, "host")):
            x = start
            for row in found.rows:
                width = getattr(row, side) / 2**30 * SCALE
                if width:
                    color = COLORS[row.kind]
                    box(axes, x, top, width, 0.34, edge=color, fill=PALE[color])
                x += width
            total = getattr(found, side) / 2**30
            write(axes, x + 0.08, top + 0.2, f"{total:.1f} GiB", size=8, color=SOFT)
        top += 0.48
    x = left
    for kind, color in COLORS.items():
        box(axes, x, top + 0.05, 0.16, 0.16, edge=color, fill=PALE[color])
        write(axes, x + 0.22, top + 0.15, kind, size=8)
        x += 1.1
    count = sum(p.numel() for p in Blocks().parameters())
    note = f"{count / 1e9:.2f} billion parameters in bfloat16, {RANKS} ranks; without activations"
    write(axes, 0.2, top + 0.45, note, size=8, color=SOFT)
    return figure


if __name__ == "__main__":
    save({"zero_offload": offload}, __doc__)
