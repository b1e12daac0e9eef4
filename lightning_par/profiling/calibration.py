"""Measures what a machine reaches: products, memory, attention, kernels, collectives.

Plain torch; every rank of the default group calls `measure` at the same time. The numbers are those
that the planner's cost model asks for, so that a prediction for this machine needs no datasheet.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_par.checkpoint.progress import advance, counted
from lightning_par.engine.collectives import (
    all_gather,
    all_reduce,
    gather_partial,
    reduce_scatter,
    reduce_to_shards,
)

__all__ = ["LinkMeasure", "Measures", "fit_positive", "measure"]

_TILE = 256 * 128
"""Elements of a product's tile in the cost model."""
_BLOCK_KERNELS, _BLOCK_STARTS = 34, 62
"""What the cost model counts for a block, both ways: kernels on the device, starts by the host."""
_PRODUCTS = ((512, 64), (512, 256), (512, 1024), (1024, 256), (1024, 1024))
"""Sizes of products: rows and columns, and the inner length."""
_MESSAGES = (12, 15, 18, 20)
"""Elements of collectives, as powers of two."""
_LAYERS = 4
"""Layers whose collectives wait."""
_ROUNDS = 5
"""Timed rounds of each measurement, of which the median counts."""


@dataclass(frozen=True, kw_only=True)
class LinkMeasure:
    """What a kind of link reaches.

    Attributes:
        start: Seconds before the first byte of a collective or a message.
        rate: Bytes/s of a rank, in one direction.
        error: Mean relative error of the straight line through the measured times.
    """

    start: float
    rate: float
    error: float


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
        attention: Speed of attention, forward and backward, relative to a large product.
        kernel: Seconds of a kernel that has nothing to do.
        host: Seconds of the host for every kernel.
        slowdown: Entry k - 1: time of an operation while k devices of a node compute, over that of
            one alone. 1 on devices that share nothing.
        waits: Entry k - 1: seconds that a collective takes longer between computations of k devices
            of a node than `link` says. Empty where a device computes and the host's cores send.
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
    attention: tuple[float, float]
    kernel: float
    host: float
    slowdown: tuple[float, ...]
    waits: tuple[float, ...]
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
    alone, first = _Alone(device, dtype, round_seconds), _rank() == 0
    with counted("measurements", "measuring", _count(device, local) if first else 0):
        of_one = alone.measure(local) if first else {}
        if _world() == 1:
            return Measures(**of_one, slowdown=(1.0,), waits=(), link=None, network=None)
        link, network = _links(alone, local)  # the others wait here for the first
        slowdown, waits = _slowdown(alone, local), _waits(alone, local, link)
    found: list[Measures | None] = [None]
    if first:
        found = [Measures(**of_one, slowdown=slowdown, waits=waits, link=link, network=network)]
    dist.broadcast_object_list(found, device=device)
    assert found[0] is not None
    return found[0]


def _count(device: torch.device, local: int) -> int:
    """Return the number of measurements that rank 0 takes part in."""
    alone = len(_PRODUCTS) + (5 if device.type == "cpu" else 6)
    pairs = 1 + (local > 2) if local > 1 else 0
    links = pairs + (_world() > local)
    at_work = _counts_at_work(local)
    waits = len(at_work[1:]) if device.type == "cpu" else 0
    return alone + len(at_work) + waits + 3 * len(_MESSAGES) * links


# One device ---------------------------------------------------------------------------------------


class _Alone:
    """Measurements of one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, round_seconds: float) -> None:
        self.device, self.dtype, self.round_seconds = device, dtype, round_seconds
        self.scale = 1 if device.type == "cpu" else 8  # what is large for it

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
            "attention": self.attention(flops),
            # A CPU runs a kernel when it starts it: what a small block takes is its kernels.
            "kernel": block / _BLOCK_KERNELS if on_cpu else kernel,
            "host": block / _BLOCK_STARTS,
            "overlaps": not on_cpu,
        }

    def capacity(self, local: int) -> tuple[int, float]:
        """Return the number of processors, and bytes of memory."""
        if self.device.type == "cpu":
            return 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
        properties = torch.cuda.get_device_properties(self.device)
        return properties.multi_processor_count, float(properties.total_memory)

    def tensor(self, *shape: int, grad: bool = False) -> Tensor:
        made = torch.randn(shape, device=self.device, dtype=self.dtype)
        return made.requires_grad_() if grad else made

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of one call, of rounds that are long enough to be timed."""
        work()
        calls = max(1, math.ceil(self.round_seconds / max(self.timed(work, 1), 1e-7)))
        median = statistics.median(self.timed(work, calls) for _ in range(_ROUNDS))
        advance("measurements")
        return median

    def timed(self, work: Callable[[], object], calls: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - start) / calls

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def products(self, processors: int) -> tuple[float, float, float]:
        """Return FLOP/s, the inner length of half speed and the seconds of a kernel.

        Fitted on products of several sizes, as the cost model writes their time: waves of tiles,
        each of which takes (K + inner_half) steps.
        """
        rows, times = [], []
        for size, inner in _PRODUCTS:
            M, K = size * self.scale, inner * self.scale
            a, b = self.tensor(M, K), self.tensor(K, M)
            times.append(self.seconds(lambda a=a, b=b: a @ b))  # type: ignore[misc]
            waves = math.ceil(M * M / _TILE / processors)
            work = 2.0 * waves * _TILE * processors
            rows.append([work * K, work, 1.0])
        inverse, half, kernel = fit_positive(rows, times)
        return 1 / inverse, half / inverse, kernel

    def copy_rate(self, target: torch.device) -> float:
        """Return the bytes per second of a copy: read and written, or sent to another device."""
        size = 2**26 * self.scale
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        pinned = target != self.device
        into = torch.ones(size, dtype=torch.uint8, device=target, pin_memory=pinned)
        passes = 2 if target == self.device else 1
        return passes * size / self.seconds(lambda: into.copy_(source, non_blocking=True))

    def elementwise_rate(self) -> float:
        """Return the bytes per second of norms, sums and activations, as the cost model counts."""
        n, D = 512 * self.scale, 512
        x, inner = self.tensor(n, D, grad=True), self.tensor(n, 4 * D, grad=True)

        def work() -> None:
            hidden = x
            for _ in range(2):
                hidden = hidden + F.layer_norm(hidden, (D,))
            torch.autograd.grad((hidden.sum(), F.gelu(inner).sum()), (x, inner))

        size = (22 + 34) * n * D + (4 + 6) * n * 4 * D
        return size * self.dtype.itemsize / 2 / self.seconds(work)

    def attention(self, flops: float) -> tuple[float, float]:
        """Return the speed of attention, forward and backward, relative to `flops`."""
        shape = (4, 8, 256 * self.scale, 64)
        q, k, v = (self.tensor(*shape, grad=True) for _ in range(3))
        counted = 4 * math.prod(shape) * shape[2] * 0.5

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        forward = self.seconds(attend)
        both = self.seconds(lambda: torch.autograd.grad(attend().sum(), (q, k, v)))
        backward = max(both - forward, forward)
        return counted / forward / flops, 2.5 * counted / backward / flops

    def block(self, tokens: int, width: int, heads: int) -> Callable[[], object]:
        """Return a call of a transformer's block, forward and backward."""
        linear = [
            torch.nn.Linear(into * width, out * width, device=self.device, dtype=self.dtype)
            for into, out in ((1, 3), (1, 1), (1, 4), (4, 1))
        ]
        x = self.tensor(1, tokens, width, grad=True)

        def work() -> None:
            normed = F.layer_norm(x, (width,))
            q, k, v = linear[0](normed).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, -1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = x + linear[1](attended.transpose(1, 2).flatten(2))
            normed = F.layer_norm(hidden, (width,))
            (hidden + linear[3](F.gelu(linear[2](normed)))).sum().backward()

        return work


def _slowdown(alone: _Alone, local: int) -> tuple[float, ...]:
    """Return how much slower one device is while others of its node compute, for 1 to `local`."""
    counts = _counts_at_work(local)
    if not counts:
        return (1.0,)
    # A training step passes through many blocks: their weights and activations leave the caches.
    blocks = [alone.block(tokens=256 * alone.scale, width=512, heads=8) for _ in range(4)]

    def work() -> None:
        for block in blocks:
            block()

    place = _rank() % local
    times = []
    for count in counts:
        dist.barrier()
        mine = torch.zeros(1, device=alone.device, dtype=torch.float64)
        if place < count and _rank() < local:
            mine[0] = alone.seconds(work) / count
        dist.all_reduce(mine)
        times.append(float(mine))
    factors = [max(1.0, t / times[0]) for t in times]
    return tuple(np.interp(range(1, local + 1), counts, factors).tolist())


def _counts_at_work(local: int) -> list[int]:
    """Return how many devices of a node are made to compute at the same time, in turn."""
    if local == 1:
        return []
    return sorted({local, *(2**i for i in range(local.bit_length()) if 2**i <= local)})


# Links --------------------------------------------------------------------------------------------


def _links(alone: _Alone, local: int) -> tuple[LinkMeasure | None, LinkMeasure | None]:
    """Return what collectives reach inside a node, and between nodes."""
    world = _world()
    inside = [list(range(first, first + local)) for first in range(0, world, local)]
    across = [list(range(place, world, local)) for place in range(local)]
    # Collectives of two slow each other down as those of a mesh do: all pairs work at once.
    pairs = [node[i : i + 2] for node in inside for i in range(0, local - 1, 2)]
    link = _measure_link(alone, [inside, pairs] if local > 2 else [inside])
    return link, _measure_link(alone, [across])


def _measure_link(alone: _Alone, choices: list[list[list[int]]]) -> LinkMeasure | None:
    """Return the line through the times of collectives in groups that work at the same time."""
    rows, times = [], []
    for groups in choices:
        if len(groups[0]) == 1:
            return None
        group, _ = dist.new_subgroups_by_enumeration(groups)
        for passes, moved, work in _collectives(alone, group, len(groups[0])):
            rows.append([passes, moved])
            times.append(_collective_seconds(alone, work if group is not None else _nothing))
    start, inverse = fit_positive(rows, times)
    pairs = zip(rows, times, strict=True)
    errors = [abs(start * passes + inverse * moved - t) / t for (passes, moved), t in pairs]
    return LinkMeasure(start=start, rate=1 / inverse, error=statistics.mean(errors))


def _collectives(
    alone: _Alone, group: Any, ranks: int
) -> Iterator[tuple[float, float, Callable[[], object]]]:
    """Yield collectives: the passes of a ring, the bytes that a rank sends, and the call."""
    for exponent in _MESSAGES:
        part = alone.tensor(2**exponent // ranks)
        whole = part.repeat(ranks)
        moved = whole.nbytes * (ranks - 1) / ranks
        yield 2.0, 2 * moved, partial(all_reduce, whole, group)
        yield 1.0, moved, partial(all_gather, part, 0, group)
        yield 1.0, moved, partial(reduce_scatter, whole, 0, group)


def _nothing() -> None:
    """Stand for the collectives of others, on a rank that is in none of their groups."""


def _collective_seconds(alone: _Alone, work: Callable[[], object]) -> float:
    """Return the median time of a collective; every rank of the default group calls this."""
    calls, rounds = 1, []
    for attempt in range(_ROUNDS + 2):
        took = _slowest(alone, work, calls)
        if attempt == 1:  # the first one connects
            calls = max(1, math.ceil(alone.round_seconds / 2 / took))  # of all ranks as many
        elif attempt > 1:
            rounds.append(took)
    advance("measurements")
    return statistics.median(rounds)


def _slowest(alone: _Alone, work: Callable[[], object], calls: int) -> float:
    """Return the seconds of a call on the slowest rank; every rank calls this."""
    dist.barrier()
    took = torch.tensor(alone.timed(work, calls), dtype=torch.float64, device=alone.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _waits(
    alone: _Alone, local: int, link: LinkMeasure | None, width: int = 512
) -> tuple[float, ...]:
    """Return what a collective of a layer waits, while 1 to `local` ranks of a node are at work.

    Layers of tensor-parallel ranks, less the same layers without collectives, less the line through
    the times of collectives in a loop. A device that computes while the host's cores start kernels
    and send waits for no core.
    """
    if alone.device.type != "cpu" or link is None:
        return ()
    counts, waits = _counts_at_work(local), [0.0]
    for count in counts[1:]:
        group = dist.new_group(list(range(count)))
        works = _layers(alone, group, count, width) if _rank() < count else (_nothing, _nothing)
        rounds = []
        for _ in range(2 * _ROUNDS + 1):
            parallel, computing = (_slowest(alone, work, 1) for work in works)
            rounds.append((parallel - computing) / (4 * _LAYERS))
        moved = width // count * width * alone.dtype.itemsize * (count - 1)
        expected = link.start + moved / link.rate
        waits.append(max(0.0, statistics.median(rounds[1:]) - expected))  # the first one connects
        advance("measurements")
    return tuple(np.interp(range(1, local + 1), counts, waits).tolist())


def _layers(
    alone: _Alone, group: dist.ProcessGroup, ranks: int, width: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call of some layers, forward and backward, with four collectives each; and without.

    Weights are DTensors of which a layer takes the local part, as those of `engine.tensor`.
    """
    plain = [alone.tensor(width, width, grad=True) for _ in range(_LAYERS)]
    mesh = DeviceMesh.from_group(group, alone.device.type)
    placed: list[Any] = [
        DTensor.from_local(w.detach(), mesh, [Replicate()]).requires_grad_() for w in plain
    ]
    part = alone.tensor(width // ranks, width, grad=True)

    def parallel() -> None:
        x = part
        for weight in placed:
            whole = gather_partial(x, 0, group)
            x = reduce_to_shards(F.linear(whole, weight.to_local()), 0, group)
        torch.autograd.grad(x.sum(), (part, *placed))

    def computing() -> None:
        x = part
        for weight in plain:
            x = F.linear(x.repeat(ranks, 1), weight)[: len(part)]
        torch.autograd.grad(x.sum(), (part, *plain))

    return parallel, computing


# Fits ---------------------------------------------------------------------------------------------


def fit_positive(rows: list[list[float]], times: list[float]) -> list[float]:
    """Return positive factors with the least squares of relative errors of rows @ factors."""
    A = torch.tensor(rows, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    scale = A.amax(0)
    free = list(range(A.shape[1]))
    while True:
        chosen = (A / scale)[:, free]
        found = torch.linalg.lstsq(chosen, torch.ones(len(A), 1, dtype=torch.float64)).solution
        values = found[:, 0].tolist()
        if min(values) > 0 or len(free) == 1:
            break
        # A factor that noise makes negative counts for nothing; the others are fitted without it.
        free.remove(free[values.index(min(values))])
    factors = [1e-12 / float(s) for s in scale]
    for place, value in zip(free, values, strict=True):
        factors[place] = max(value, 1e-12) / float(scale[place])
    return factors


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
