"""Draws what compressed gradients lose in a step and over several; the options are those of
draw.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from canvas import canvas, heat, save, SOFT, write
from matplotlib.figure import Figure
from torch import Tensor

from lightning_par.engine.data.compression.methods import choose_compressor, GradientBucket
from lightning_par.engine.data.compression.options import GradientCompression

SIZE, STEPS, CELL = 14, 16, 0.108
STRONGEST = 0.04  # for `heat`
METHODS: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8"},
    "topk, density 0.05": {"method": "topk", "density": 0.05},
    "powersgd, rank 1": {"method": "powersgd", "rank": 1},
}


def gradient() -> Tensor:
    """Two outer products and some noise."""
    generator = torch.Generator().manual_seed(4)
    left, right, noise = (torch.randn(SIZE, n, generator=generator) for n in (2, 2, SIZE))
    found = left @ torch.diag(torch.tensor([1.0, 0.5])) @ right.T + 0.15 * noise
    return found * (STRONGEST / 2)


def arrived(options: dict[str, Any], steps: int) -> Tensor:
    """What arrives of the same gradient in so many steps, per step."""
    compressor = choose_compressor(GradientCompression(**options), dist.group.WORLD)
    total = torch.zeros(SIZE, SIZE)
    for _ in range(steps):
        bucket = GradientBucket(0, [gradient()])
        compressor.reduce(bucket)
        total += bucket.gradients()[0]
    return total / steps


def shown(values: Tensor) -> Tensor:
    """Return values in few steps, so that the last digits of another machine do not show."""
    return (values * (16 / STRONGEST)).round() * (STRONGEST / 16)


def compression() -> Figure:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figure, axes = canvas(9.2, 4.75, title="The same gradient, as it arrives at the optimizer")
    side, tops = SIZE * CELL, {1: 0.95, STEPS: 2.8}
    write(axes, 1.35, 0.75, "computed", size=8)
    heat(axes, shown(gradient()), 1.35, tops[1], CELL)
    for steps, top in tops.items():
        said = "in one step" if steps == 1 else f"mean of\n{steps} steps"
        write(axes, 0.2, top + side / 2, said, size=8, color=SOFT)
    for number, (name, options) in enumerate(METHODS.items(), 1):
        left = 1.35 + number * (side + 0.35)
        write(axes, left, 0.75, name, size=8)
        for steps, top in tops.items():
            found = arrived(options, steps)
            heat(axes, shown(found), left, top, CELL)
            error = float((found - gradient()).norm() / gradient().norm())
            write(axes, left, top + side + 0.12, f"error {error:.1%}", size=7, color=SOFT)
    return figure


if __name__ == "__main__":
    save({"gradient_compression": compression}, __doc__)
