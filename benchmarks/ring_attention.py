"""Time of divided attention, forward and backward: against every rank running the whole problem,
and against torch's own template.

Two ranks: 2048 and 4096 tokens; the target is 1.15 times the whole problem's time over 2. Four
ranks: 2048 tokens, torch's template with either of its ways; the target is less than its time. The
last table compares the time that ranks wait for messages, with receives posted before the
computation and without.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _paired import Arguments, compare, launch, parse_arguments, Turn
from _torch_ring import prepare, torch_ring
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.context.apply import build_axis
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.context.ring_p2p import PendingExchange, RingChannel
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.mesh import build_mesh
from lightning_par.sizes import ParallelSizes

HEADS, DIM = 4, 64
Attend = Callable[..., Tensor]


def make_axis() -> SequenceShard:
    sizes = ParallelSizes(context=dist.get_world_size())
    return build_axis(build_mesh(sizes, "cpu"), ContextOptions())


def loop(tokens: int, attend: Attend, arguments: Arguments, turn: Turn) -> None:
    """Forward and backward on tensors of this many tokens."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, HEADS, tokens, DIM)
    for _ in range(arguments.total_steps):
        turn.next()
        attend(*leaves).backward(grad)


def two_ranks(arguments: Arguments) -> None:
    for length in (2048, 4096):
        axis = make_axis()
        axis.set_length(length)
        ours = partial(axis.attend, causal=True)
        whole = partial(F.scaled_dot_product_attention, is_causal=True)
        contenders = {
            "whole problem": partial(loop, length, whole, arguments),
            "ring": partial(loop, length // 2, ours, arguments),
        }
        title = f"2 ranks, causal, {length} tokens"
        compare(title, contenders, arguments, targets={"ring": 1.15 / 2})


def four_ranks(arguments: Arguments) -> None:
    length = 2048
    axis = make_axis()
    axis.set_length(length)
    contenders: dict[str, Any] = {}
    for rotate in ("allgather", "alltoall"):
        template = prepare(rotate, balanced=True)
        if template is None:
            print("torch's template is not in this version")
            return

        def attend(*leaves: Tensor, rotate: str = rotate) -> Tensor:
            chosen = prepare(rotate, balanced=True)
            return torch_ring(*leaves, causal=True, template=chosen)

        contenders[f"torch, {rotate}"] = partial(loop, length // 4, attend, arguments)
    contenders["ring"] = partial(loop, length // 4, partial(axis.attend, causal=True), arguments)
    compare(f"4 ranks, causal, {length} tokens", contenders, arguments, targets={"ring": 1.0})
    exposed(axis, arguments)


class TimedChannel(RingChannel):
    """Adds up the time for which a rank waits; may wait at once, so that nothing overlaps."""

    def __init__(self, group: Any, *, at_once: bool) -> None:
        super().__init__(group)
        self.seconds, self._at_once = 0.0, at_once

    def post(self, *args: Any, **options: Any) -> PendingExchange:
        """Post, and wait if it is to be at once."""
        pending = super().post(*args, **options)
        if self._at_once:
            start = time.perf_counter()
            for work in pending.works:
                work.wait()
            pending.works = []
            self.seconds += time.perf_counter() - start
        return pending

    def wait(self, pending: PendingExchange) -> Any:
        """Wait, and count how long."""
        start = time.perf_counter()
        received = super().wait(pending)
        self.seconds += time.perf_counter() - start
        return received


def exposed(axis: SequenceShard, arguments: Arguments) -> None:
    """Print the wait of a step with and without overlap, mean over the ranks, paired."""
    leaves = [torch.randn(1, HEADS, axis.layout.local, DIM, requires_grad=True) for _ in range(3)]
    ratios, waits = [], []
    for _ in range(arguments.pairs):
        pair = []
        for at_once in (True, False):
            axis.channel = channel = TimedChannel(axis.group, at_once=at_once)
            dist.barrier()
            for _ in range(arguments.steps):
                axis.attend(*leaves, causal=True).sum().backward()
            mean = torch.tensor(channel.seconds / arguments.steps)
            dist.all_reduce(mean)
            pair.append(1000 * float(mean) / dist.get_world_size())
        waits.append(pair)
        ratios.append(pair[1] / pair[0])
    if dist.get_rank() == 0:
        without, ahead = (statistics.median(w[i] for w in waits) for i in (0, 1))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"wait per step: {without:.1f} ms without overlap, {ahead:.1f} ms with receives")
        print(f"posted ahead; ratio {middle:.3f}, quartiles {low:.3f}..{high:.3f}, target 0.5")


def main() -> None:
    arguments = parse_arguments(__doc__)
    launch(two_ranks, arguments, ranks=2)
    launch(four_ranks, arguments, ranks=4)


if __name__ == "__main__":
    main()
