"""What a ring costs on one CUDA device: N members in turn, each with its share of the queries and
all keys and values, against plain flash attention over the same tokens.

Nothing is sent: a member finds the others' keys and values at once, so that only the smaller calls,
the merging and the copies of messages count. Forward and backward, bfloat16, causal. A trace says
how long the device computes, and for how long it waits for the host to launch.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from _trace import trace_device
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.context.ring_attention import ring_attention
from lightning_par.engine.context.ring_p2p import KeyValues, PendingExchange, RingChannel
from lightning_par.engine.context.ring_schedule import RingSchedule, TokenLayout

HEADS, DIM = 16, 128


class Local(RingChannel):
    """Hands out what the other members hold, also in place of the gradients that they would send:
    only sizes matter here.
    """

    def __init__(self, held: list[KeyValues]) -> None:
        self._held = held

    def post(
        self, send: Any, receive: Any, source: KeyValues, dtype: Any = None
    ) -> PendingExchange:
        """Copy what would be sent, and what would arrive."""
        if send is not None:
            source.at(send.intervals)
        received = None
        if receive is not None:
            received = self._held[receive.owner].at(receive.intervals)
        return PendingExchange(received, None, [])

    def wait(self, pending: PendingExchange) -> KeyValues | None:
        """Return at once."""
        return pending.received


def seconds(run: Callable[[], None], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of every member")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        sys.exit(0)
    length = options.tokens * options.members
    layout = TokenLayout(length=length, ring=options.members)
    schedule = RingSchedule(layout=layout, causal=True)

    def draw(tokens: int) -> list[Tensor]:
        shape = (1, HEADS, tokens, DIM)
        made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        return [*(x.requires_grad_() for x in made[:3]), made[3]]

    whole, parts = draw(length), [draw(options.tokens) for _ in range(options.members)]
    held = [KeyValues.pack(p[1].detach(), p[2].detach()) for p in parts]

    def plain() -> None:
        F.scaled_dot_product_attention(*whole[:3], is_causal=True).backward(whole[3])

    def ring() -> None:
        for member, part in enumerate(parts):
            out = ring_attention(*part[:3], schedule=schedule, member=member, channel=Local(held))
            out.backward(part[3])

    for run in (plain, ring):
        seconds(run, 2)
    pairs = [(seconds(plain, 2), seconds(ring, 2)) for _ in range(options.pairs)]
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{options.members} members of {options.tokens} tokens, {HEADS} heads of {DIM}")
    print(f"plain {1000 * statistics.median(a for a, _ in pairs):.1f} ms")
    print(f"ring  {1000 * statistics.median(b for _, b in pairs):.1f} ms")
    for name, run in {"plain": plain, "ring": ring}.items():
        print(f"{name:<6}{trace_device(run) or 'not traced: this torch records no CUDA device'}")
    print(f"share of plain's speed: {middle:.3f}, quartiles {low:.3f}..{high:.3f}, target 0.902")


if __name__ == "__main__":
    main()
