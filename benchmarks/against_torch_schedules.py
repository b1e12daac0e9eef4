"""Step time and bubble of every pipeline schedule against torch's of that kind, pp 4 on four ranks.

Stages sleep where they would compute, as in `unequal_stages.py`, but all blocks take equally long,
so that two cores suffice and a step is as long as its order makes it. Both run the same blocks and
micro-batches in a bare loop; theirs over `torch.distributed.pipelining`, ours over the engine's
`PipelineExecutor`. The bubble is the idle part of a step from barrier to barrier.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
from _paired import add_arguments, Arguments, compare, launch, read_arguments, Turn
from torch import nn, Tensor
from torch.distributed.pipelining import PipelineStage
from unequal_stages import PIECES, RANKS, SleepingBlock, UNIT

from lightning_par.engine.pipeline.schedules import build_schedule, place_stages, SCHEDULES
from lightning_par.engine.pipeline.simulator import simulate
from tests.support.models.staged import build, data, Net, Staged

BLOCKS = 8
THEIRS = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of torch's schedules, by ours."""


class TorchStage(nn.Module):
    """What one stage of torch's pipeline runs."""

    def __init__(self, whole: Net, start: int, end: int) -> None:
        super().__init__()
        self.enter = whole.enter if start == 0 else nn.Identity()
        self.blocks = whole.blocks[start:end]
        self.leave = whole.leave if end == BLOCKS else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 2] or [B, 3] to [B, 3] or [B, 1]."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.leave(x)
        return found


def make_model() -> Net:
    """Return a network of equal sleeping blocks."""
    model: Net = build(block=SleepingBlock, blocks=BLOCKS)
    for block in model.blocks:
        block.seconds = UNIT
    return model


def bounds_of(name: str) -> tuple[tuple[int, int], ...]:
    """Return the first and one-past-last block of every stage."""
    stages = RANKS * SCHEDULES[name].stages_per_rank
    return tuple(itertools.pairwise(i * BLOCKS // stages for i in range(stages + 1)))


def torch_loop(name: str, arguments: Arguments, turn: Turn) -> None:
    """Train with torch's schedule."""
    model, bounds, rank = make_model(), bounds_of(name), dist.get_rank()
    held = [stage for stage, owner in enumerate(place_stages(name, RANKS)) if owner == rank]
    stages = [
        PipelineStage(TorchStage(model, *bounds[s]), s, len(bounds), torch.device("cpu"))
        for s in held
    ]
    kind = torch_schedules.get_schedule_class(THEIRS[name])
    several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    loss = nn.MSELoss()
    schedule = kind(
        stages if several else stages[0], PIECES, loss_fn=lambda out, y: loss(out.squeeze(-1), y)
    )
    batch = data(PIECES)
    inputs = [batch["x"]] if 0 in held else []
    target = {"target": batch["y"], "losses": []} if len(bounds) - 1 in held else {}
    for _ in range(arguments.total_steps):
        turn.next()
        schedule.step(*inputs, **target)


def engine_loop(name: str, arguments: Arguments, turn: Turn) -> None:
    """Train with our executor."""
    staged = Staged(make_model(), bounds_of(name), schedule=name)
    batch = data(PIECES)
    for _ in range(arguments.total_steps):
        turn.next()
        staged.train(batch, PIECES)


def body(names: Sequence[str], arguments: Arguments) -> None:
    """Print a table for every schedule, then their bubbles, on rank 0."""
    torch.set_default_dtype(torch.float64)
    rows = []
    for name in names:
        theirs = THEIRS[name]
        # Makes the groups of the pipeline on all ranks before the contenders' threads start.
        Staged(make_model(), bounds_of(name), schedule=name)
        seconds = compare(
            f"{name}, {RANKS} ranks",
            {
                theirs: lambda turn, name=name: torch_loop(name, arguments, turn),
                name: lambda turn, name=name: engine_loop(name, arguments, turn),
            },
            arguments,
            targets={name: 1.0},
        )
        busy = PIECES * 3 * UNIT * BLOCKS / RANKS
        wanted = simulate(build_schedule(name, RANKS, PIECES)).bubble
        idle = [1 - busy / seconds[contender] for contender in (name, theirs)]
        rows.append(f"| {name} | {wanted:.3f} | {idle[0]:.3f} | {idle[1]:.3f} |")
    if dist.get_rank() == 0:
        print("| schedule | bubble, simulated | ours | torch's |\n|---|---|---|---|")
        print("\n".join(rows), flush=True)


def main() -> None:
    """Measure the schedules that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--only", nargs="+", choices=THEIRS, default=list(THEIRS))
    parser.set_defaults(pairs=7, steps=2, warmup=1)
    options = parser.parse_args()
    launch(partial(body, options.only), read_arguments(options), ranks=RANKS)


if __name__ == "__main__":
    main()
