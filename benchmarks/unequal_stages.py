"""The bubble of a pipeline whose stages take unequal times: simulated, and measured on gloo ranks.

Stages sleep where they would compute, so that four ranks need no core of their own; the executor,
its messages and its clock are the real ones. One block is computed in a unit of time, another in
four; the forward, the gradients of inputs and those of weights take as long as each other.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from _paired import add_arguments, Arguments, launch, read_arguments
from torch import nn, Tensor

from lightning_par.engine.pipeline.schedules import build_schedule, SCHEDULES
from lightning_par.engine.pipeline.simulator import bubble_fraction, simulate, span_bubble_fraction
from tests.support.models.staged import build, data, Staged, WIDTH

RANKS, PIECES = 4, 8
UNIT = 0.02
UNITS = (0.5, 0.5, 1.5, 1.0, 2.0, 1.5, 0.5, 0.5)
"""Times of the eight blocks."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingBlock(nn.Module):
    """A block whose forward and both halves of whose backward take `seconds` each."""

    seconds = 0.0

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(lambda _: time.sleep(self.seconds))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 3] to [B, 3]."""
        slept: Tensor = _Sleep.apply(x, self.seconds)
        found: Tensor = self.linear(slept)
        return found


def measure(arguments: Arguments) -> None:
    """Print a row for every schedule on rank 0."""
    torch.set_default_dtype(torch.float64)
    for name in sorted(SCHEDULES):
        stages = RANKS * SCHEDULES[name].stages_per_rank
        cuts = [i * len(UNITS) // stages for i in range(stages + 1)]
        model = build(block=SleepingBlock, blocks=len(UNITS))
        for block, units in zip(model.blocks, UNITS, strict=True):
            block.seconds = units * UNIT
        staged = Staged(model, tuple(itertools.pairwise(cuts)), schedule=name)
        found = []
        for _ in range(arguments.warmup + arguments.pairs):
            events: list[Any] = [None] * RANKS
            dist.barrier()
            dist.all_gather_object(events, staged.train(data(PIECES), PIECES).events)
            found.append((bubble_fraction(events), span_bubble_fraction(events)))
        costs = [sum(UNITS[start:end]) for start, end in itertools.pairwise(cuts)]
        wanted = simulate(
            build_schedule(name, RANKS, PIECES), forward=costs, backward=[2 * c for c in costs]
        )
        if dist.get_rank() == 0:
            cells = [
                _cell(simulated, measured)
                for simulated, measured in zip(
                    (wanted.bubble, wanted.span_bubble),
                    zip(*found[arguments.warmup :], strict=True),
                    strict=True,
                )
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _cell(simulated: float, measured: tuple[float, ...]) -> str:
    middle = statistics.median(measured)
    spread = f"{min(measured):.3f} to {max(measured):.3f}"
    return f"{simulated:.3f} | {middle:.3f} ({spread}) | {middle - simulated:+.3f}"


def main() -> None:
    """Print both definitions of the bubble for every schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.set_defaults(pairs=5, warmup=1)
    print("| schedule | bubble, simulated | measured | off by | of spans | measured | off by |")
    print("|---|---|---|---|---|---|---|")
    launch(measure, read_arguments(parser.parse_args()), ranks=RANKS)


if __name__ == "__main__":
    main()
