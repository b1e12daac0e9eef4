"""Measures what a machine reaches: products, memory, attention, kernels, collectives.

Plain torch; every rank of the default group calls `measure` at the same time. The numbers are those
that the planner's cost model asks for, so that a prediction for this machine needs no datasheet.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor

from lightning_par.checkpoint.progress import counted
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.planner.block_trace import trace_shape
from lightning_par.profiling.link_rates import (
    count_of_links,
    counts_at_work,
    LinkMeasure,
    measure_exchange,
    measure_inside,
    measure_network,
    measure_waits,
    Rates,
)
from lightning_par.profiling.rounds import fit_positive, nothing, rank, Rounds, world

__all__ = ["Measures", "measure"]

_TILE = 256 * 128
"""Elements of a product's tile in the cost model."""
_BLOCK_KERNELS, _BLOCK_STARTS = 34, 62
"""What the cost model counts for a block, both ways: kernels on the device, starts by the host."""
_PRODUCTS = ((512, 64), (512, 256), (512, 1024), (1024, 256), (1024, 1024))
"""Sizes of products: rows and columns, and the inner length."""
_SLOWDOWN_ROUNDS = 9
_CACHED = 2**26
"""Bytes of operands that no cache of a core holds."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What one device of a machine reaches, and the links to the others.

    Attributes:
        flops: Of a large matrix product, FLOP/s, by one device that works alone.
        inner_half: Inner length of a product at which it reaches half of its speed.
        processors: Multiprocessors; 1 on a CPU.
        bandwidth: Of a copy in memory, bytes read and written per second.
        memory: Of the device, bytes; on a CPU, its share of the host's.
        host_link: Copies from the device to the host, bytes/s.
        elementwise: Share of `bandwidth` that norms, sums and activations reach.
        eager: Bytes/s of operators that run one by one, as a trace counts them; 0 on a GPU.
        attention: Speed of attention, forward and backward, relative to a large product.
        kernel: Seconds of a kernel that has nothing to do.
        host: Seconds of the host for every kernel.
        slowdown: Entry k - 1: time of an operation while k devices of a node compute, over that of
            one alone. 1 on devices that share nothing.
        collectives: Start and rate of each kind inside a node, with 1 to all its devices at work.
        waits: Entry k - 1: seconds that a collective takes longer between computations of k devices
            of a node than in a loop. Empty where a device computes and the host's cores send.
        exchange: Entry k - 1: how many times longer than in a loop collectives take by which k
            replicas share states, with the copies around them; empty as `waits`.
        overlaps: Whether messages move beside computation: not where the same cores do both.
        link: Inside a node; None with one device.
        network: Between nodes; None on one node.
    """

    flops: float
    inner_half: float
    processors: int
    bandwidth: float
    memory: float
    host_link: float
    elementwise: float
    eager: float
    attention: tuple[float, float]
    kernel: float
    host: float
    slowdown: tuple[float, ...]
    collectives: Rates
    waits: tuple[float, ...]
    exchange: tuple[float, ...]
    overlaps: bool
    link: LinkMeasure | None
    network: LinkMeasure | None


def measure(
    device: torch.device, dtype: torch.dtype, local: int, *, round_seconds: float = 0.04
) -> Measures:
    """Measure this machine.

    Args:
        device: Of this rank.
        dtype: Of the products and of what ranks send.
        local: Ranks of a node; those of a node are neighbors.
        round_seconds: What a timed round takes at least; more of it bears a busier machine.

    Returns:
        The same on every rank.
    """
    alone, first = _Alone(device, dtype, round_seconds), rank() == 0
    with counted("measurements", "measuring", _count(device, local) if first else 0):
        # By one device alone: the others are still, so that nothing shares its caches and cores.
        of_one = alone.measure(local) if first else {}
        eager = of_one.get("eager", math.inf)  # what rank 0 finds counts
        link, rates = measure_inside(alone, local)  # the others wait here for the first
        together: dict[str, Any] = {
            "link": link,
            "network": measure_network(alone, local),
            "collectives": rates,
            "slowdown": _slowdown(alone, local),
            "waits": measure_waits(alone, local, rates, eager),
            "exchange": measure_exchange(alone, local, rates),
        }
    found: list[Measures | None] = [Measures(**of_one, **together) if first else None]
    if world() == 1:
        assert found[0] is not None
        return found[0]
    # Rank 0's numbers: ranks that predict must not come to different layouts.
    dist.broadcast_object_list(found, device=device)
    assert found[0] is not None
    return found[0]


def _count(device: torch.device, local: int) -> int:
    """Return the number of measurements that rank 0 takes part in."""
    alone, at_work = len(_PRODUCTS) + 6, counts_at_work(local)
    waits = len(at_work[1:]) if device.type == "cpu" else 0
    return alone + len(at_work) + 2 * waits + count_of_links(local)


# One device ---------------------------------------------------------------------------------------


class _Alone(Rounds):
    """Measurements of one device."""

    def measure(self, local: int) -> dict[str, Any]:
        processors, memory = self.capacity(local)
        flops, inner_half, kernel = self.products(processors)
        block = self.seconds(self.block(tokens=1, width=8, heads=1))
        bandwidth = self.copy_rate(self.device)
        on_cpu = self.device.type == "cpu"
        return {
            "flops": flops,
            "inner_half": inner_half,
            "processors": processors,
            "bandwidth": bandwidth,
            "memory": memory,
            "host_link": bandwidth if on_cpu else self.copy_rate(torch.device("cpu")),
            "elementwise": self.elementwise_rate() / bandwidth,
            "eager": self.eager_rate(block / _BLOCK_KERNELS) if on_cpu else 0.0,
            "attention": self.attention(flops),
            # A CPU runs a kernel when it starts it: what a small block takes is its kernels.
            "kernel": block / _BLOCK_KERNELS if on_cpu else kernel,
            "host": block / _BLOCK_STARTS,
            "overlaps": not on_cpu,
        }

    def capacity(self, local: int) -> tuple[int, float]:
        """Return the number of processors, and bytes of memory."""
        if self.device.type == "cpu":
            # Ranks of a node share its memory.
            return 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
        properties = torch.cuda.get_device_properties(self.device)
        return properties.multi_processor_count, float(properties.total_memory)

    def products(self, processors: int) -> tuple[float, float, float]:
        """Return FLOP/s, the inner length of half speed and the seconds of a kernel.

        Fitted on products of several sizes, as the cost model writes their time: waves of tiles,
        each of which takes (K + inner_half) steps.
        """
        rows, times = [], []
        for size, inner in _PRODUCTS:
            M, K = size * self.scale, inner * self.scale
            # A step comes back to an operand when the caches hold others, and writes new tensors.
            held = (2 * M * K + M * M) * self.dtype.itemsize
            operands = [
                [self.tensor(M, K), self.tensor(K, M), self.tensor(M, M)]
                for _ in range(math.ceil(_CACHED * self.scale / held))
            ]
            turns = cycle(operands)
            times.append(self.seconds(partial(_multiply_next, turns)))
            waves = math.ceil(M * M / _TILE / processors)
            # As the model counts: a part of the last wave takes as long as a whole one.
            work = 2.0 * waves * _TILE * processors
            rows.append([work * K, work, 1.0])
        # Linear in 1/F, h/F and the kernel: t = work K / F + work h / F + kernel.
        inverse, half, kernel = fit_positive(rows, times)
        return 1 / inverse, half / inverse, kernel

    def copy_rate(self, target: torch.device) -> float:
        """Return the bytes per second of a copy: read and written, or sent to another device."""
        size = 2**26 * self.scale
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        # From pageable memory a copy would go by a buffer of the driver's, at half the rate.
        pinned = target != self.device
        into = torch.ones(size, dtype=torch.uint8, device=target, pin_memory=pinned)
        # Read and written in the same memory.
        passes = 2 if target == self.device else 1
        return passes * size / self.seconds(lambda: into.copy_(source, non_blocking=True))

    def elementwise_rate(self) -> float:
        """Return the bytes per second of norms, sums and activations, as the cost model counts."""
        n, D = 512 * self.scale, 512
        x, inner = self.tensor(n, D, grad=True), self.tensor(n, 4 * D, grad=True)

        def work() -> None:
            # [n, D], as the residual stream between two blocks.
            hidden = x
            for _ in range(2):
                hidden = hidden + F.layer_norm(hidden, (D,))
            torch.autograd.grad((hidden.sum(), F.gelu(inner).sum()), (x, inner))

        # Bytes per entry that the cost model counts for these, in 2-byte words.
        size = (22 + 34) * n * D + (4 + 6) * n * 4 * D
        return size * self.dtype.itemsize / 2 / self.seconds(work)

    def eager_rate(self, operator: float) -> float:
        """Return the bytes per second of operators, in layers whose tensors leave the caches.

        Args:
            operator: Seconds of one that moves nothing.
        """
        B, T, D = 8 * self.scale, 128, 512
        layers = nn.Sequential(*(_Layer(D) for _ in range(4))).to(self.device, self.dtype)
        x = self.tensor(B, T, D, grad=True)
        shape = trace_shape(
            layers, ParallelPlan(), (x[:1].detach().requires_grad_(),), backward=True
        )
        # What the planner's trace counts for the same layers, so that both mean the same bytes.
        parts = (shape.before, *shape.blocks, shape.after)
        words = sum(B * (p.eager.total + p.eager_backward.total) for p in parts)
        words += sum(p.eager_weights.total for p in parts)
        gradient, inputs = torch.ones_like(x), (x, *layers.parameters())
        took = self.seconds(lambda: torch.autograd.grad(layers(x), inputs, gradient))
        started = operator * sum(sum(p.operators) for p in parts)
        # Less the starts of operators; what is left has to be something, also where noise is
        # larger.
        return words * self.dtype.itemsize / max(took - started, 0.1 * took)

    def attention(self, flops: float) -> tuple[float, float]:
        """Return the speed of attention, forward and backward, relative to `flops`."""
        shape = (4, 8, 256 * self.scale, 64)
        q, k, v = (self.tensor(*shape, grad=True) for _ in range(3))
        # 4 B H T T D for two products, half of which is masked.
        counted = 4 * math.prod(shape) * shape[2] * 0.5

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        forward = self.seconds(attend)
        both = self.seconds(lambda: torch.autograd.grad(attend().sum(), (q, k, v)))
        # A backward takes no less than its forward: noise must not make it faster.
        backward = max(both - forward, forward)
        # Five products in the backward, two in the forward.
        return counted / forward / flops, 2.5 * counted / backward / flops

    def block(self, tokens: int, width: int, heads: int) -> Callable[[], object]:
        """Return a call of a transformer's block, forward and backward."""
        linear = [
            torch.nn.Linear(into * width, out * width, device=self.device, dtype=self.dtype)
            for into, out in ((1, 3), (1, 1), (1, 4), (4, 1))
        ]
        x = self.tensor(1, tokens, width, grad=True)

        # Of these kernels and starts: `_BLOCK_KERNELS`, `_BLOCK_STARTS`.
        def work() -> None:
            normed = F.layer_norm(x, (width,))
            q, k, v = linear[0](normed).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, -1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = x + linear[1](attended.transpose(1, 2).flatten(2))
            normed = F.layer_norm(hidden, (width,))
            (hidden + linear[3](F.gelu(linear[2](normed)))).sum().backward()

        return work


def _multiply_next(operands: Iterator[list[Tensor]]) -> None:
    kept = next(operands)
    kept[2] = kept[0] @ kept[1]


class _Layer(nn.Module):
    """What decoder blocks do beside products and attention, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.RMSNorm(width), nn.LayerNorm(width)))

    def forward(self, x: Tensor) -> Tensor:
        """Norms, a rotation of halves, activations, a gate and residual sums."""
        low, high = self.norms[0](x).chunk(2, -1)
        x = x + torch.cat((-high, low), -1) * x
        return x + F.silu(self.norms[1](x)) * F.gelu(x)


def _slowdown(alone: _Alone, local: int) -> tuple[float, ...]:
    """Return how much slower one device is while others of its node compute, for 1 to `local`."""
    counts = counts_at_work(local)
    if not counts:
        return (1.0,)
    # A training step passes through many blocks: their weights and activations leave the caches.
    blocks = [alone.block(tokens=128 * alone.scale, width=512, heads=8) for _ in range(4)]

    def work() -> None:
        for block in blocks:
            block()

    # On the slowest: a step waits for it, and ranks that take turns on a core all take long.
    # All ranks take part, as `together` is a collective; those above the count do nothing.
    works = [work if rank() < count else nothing for count in counts]
    rounds = list(zip(*alone.together(*works, rounds=_SLOWDOWN_ROUNDS), strict=True))
    factors = [
        # Of each round by itself: what else the machine does then slows both.
        max(1.0, statistics.median(times[place] / times[0] for times in rounds))
        for place in range(len(counts))
    ]
    return tuple(np.interp(range(1, local + 1), counts, factors).tolist())
