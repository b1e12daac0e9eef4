"""Measures collectives: their rates by kind and by ranks at work, and what they wait in a layer."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from lightning_par.engine.collectives import (
    all_gather,
    all_reduce,
    gather_partial,
    reduce_scatter,
    reduce_to_shards,
)
from lightning_par.profiling.rounds import fit_positive, nothing, rank, Rounds, world

__all__ = [
    "KINDS",
    "LinkMeasure",
    "Rates",
    "count_of_links",
    "counts_at_work",
    "measure_exchange",
    "measure_inside",
    "measure_network",
    "measure_waits",
]

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_MESSAGES = (12, 15, 18, 20)
"""Elements of collectives, as powers of two."""
_LAYERS = 4
"""Layers whose collectives wait."""
_WAIT_ROUNDS = 7

Rates = Mapping[str, tuple[tuple[float, float], ...]]
"""Kind of a collective -> for 1 to all ranks of a node at work: its start and its rate."""


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


@dataclass(frozen=True)
class _Row:
    """A timed collective: its passes of a ring, the bytes that a rank sends, and seconds."""

    kind: str
    ranks: int
    passes: float
    moved: float
    seconds: float


def counts_at_work(local: int) -> list[int]:
    """Return how many devices of a node are made to work at the same time, in turn."""
    if local == 1:
        return []
    return sorted({local, *(2**i for i in range(local.bit_length()) if 2**i <= local)})


def count_of_links(local: int) -> int:
    """Return the number of measurements of `measure_inside` and `measure_network`."""
    choices = sum(len(_groupings(count, local)) for count in counts_at_work(local)[1:])
    return len(KINDS) * len(_MESSAGES) * (choices + (world() > local))


def measure_inside(rounds: Rounds, local: int) -> tuple[LinkMeasure | None, Rates]:
    """Return the line through all collectives while all ranks of a node work, and every kind's.

    Args:
        rounds: Of this rank.
        local: Ranks of a node.
    """
    counts = counts_at_work(local)[1:]
    if not counts:
        return None, {}
    rows: list[_Row] = []
    lines: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for count in counts:
        rows = [row for groups in _groupings(count, local) for row in _timed(rounds, groups)]
        for kind in KINDS:
            own = [row for row in rows if row.kind == kind]
            table = [[math.log2(row.ranks), row.moved] for row in own]
            start, inverse = fit_positive(table, [row.seconds for row in own])
            lines[kind].append((start, 1 / inverse))
    every = range(1, local + 1)
    rates = {}
    for kind, found in lines.items():
        starts, speeds = (np.interp(every, counts, [f[i] for f in found]) for i in range(2))
        rates[kind] = tuple(zip(starts.tolist(), speeds.tolist(), strict=True))
    return _line(rows), rates


def measure_network(rounds: Rounds, local: int) -> LinkMeasure | None:
    """Return the line through the collectives of ranks on different nodes."""
    if world() == local:
        return None
    return _line(_timed(rounds, [list(range(place, world(), local)) for place in range(local)]))


def _groupings(count: int, local: int) -> list[list[list[int]]]:
    """Return ways to group the first `count` ranks of every node: all of them, and pairs."""
    nodes = [list(range(first, first + count)) for first in range(0, world(), local)]
    # Collectives of two slow each other down as those of a mesh do: all pairs work at once.
    pairs = [node[i : i + 2] for node in nodes for i in range(0, count - 1, 2)]
    return [nodes, pairs] if count > 2 else [nodes]


def _timed(rounds: Rounds, groups: list[list[int]]) -> list[_Row]:
    """Return the times of collectives in groups that work at the same time; all ranks call this."""
    made = [dist.new_group(group) for group in groups]
    mine = next((g for g, ranks in zip(made, groups, strict=True) if rank() in ranks), None)
    rows = []
    for kind, passes, moved, work in _collectives(rounds, mine, len(groups[0])):
        (seconds,) = rounds.together(nothing if mine is None else work)
        rows.append(_Row(kind, len(groups[0]), passes, moved, statistics.median(seconds)))
    return rows


def _line(rows: list[_Row]) -> LinkMeasure:
    times = [row.seconds for row in rows]
    start, inverse = fit_positive([[row.passes, row.moved] for row in rows], times)
    errors = [abs(start * r.passes + inverse * r.moved - r.seconds) / r.seconds for r in rows]
    return LinkMeasure(start=start, rate=1 / inverse, error=statistics.mean(errors))


def _collectives(
    rounds: Rounds, group: Any, ranks: int
) -> Iterator[tuple[str, float, float, Callable[[], object]]]:
    """Yield collectives: kind, passes of a ring, bytes that a rank sends, and the call."""
    for exponent in _MESSAGES:
        part = rounds.tensor(2**exponent // ranks)
        whole = part.repeat(ranks)
        moved = whole.nbytes * (ranks - 1) / ranks
        yield "all_reduce", 2.0, 2 * moved, partial(all_reduce, whole, group)
        yield "all_gather", 1.0, moved, partial(all_gather, part, 0, group)
        yield "reduce_scatter", 1.0, moved, partial(reduce_scatter, whole, 0, group)


def measure_waits(
    rounds: Rounds, local: int, rates: Rates, eager: float, width: int = 512
) -> tuple[float, ...]:
    """Return what a collective of a layer waits, while 1 to `local` ranks of a node are at work.

    Layers of tensor-parallel ranks, less the same layers without collectives, less the times of
    such collectives in a loop and of the copies that join their parts. A device that computes while
    the host's cores start kernels and send waits for no core.

    Args:
        rounds: Of this rank.
        local: Ranks of a node.
        rates: Of collectives in a loop.
        eager: Bytes/s of copies.
        width: Of the layers.
    """
    if rounds.device.type != "cpu" or not rates:
        return ()
    counts, waits = counts_at_work(local), [0.0]
    for count in counts[1:]:
        group = dist.new_group(list(range(count)))
        works = _layers(rounds, group, count, width) if rank() < count else (nothing, nothing)
        pairs = zip(*rounds.together(*works, rounds=_WAIT_ROUNDS), strict=True)
        moved = width // count // 4 * 4 * width * rounds.dtype.itemsize * (count - 1)
        lines = [rates[kind][count - 1] for kind in ("all_gather", "reduce_scatter")]
        expected = statistics.mean(start * math.log2(count) + moved / rate for start, rate in lines)
        expected += 2 * width * width * rounds.dtype.itemsize / eager
        # Of a layer's four collectives.
        took = statistics.median(parallel - alone for parallel, alone in pairs) / (4 * _LAYERS)
        waits.append(max(0.0, took - expected))
    return tuple(np.interp(range(1, local + 1), counts, waits).tolist())


def measure_exchange(
    rounds: Rounds, local: int, rates: Rates, width: int = 1024
) -> tuple[float, ...]:
    """Return how many times longer than in a loop the collectives of sharded replicas take.

    Layers under FSDP2, less the same layers whole, over what such collectives take in a loop: the
    copies into and out of buffers, memory that is touched for the first time, and waiting.

    Args:
        rounds: Of this rank.
        local: Ranks of a node.
        rates: Of collectives in a loop.
        width: Of the layers.
    """
    if rounds.device.type != "cpu" or not rates:
        return ()
    counts, factors = counts_at_work(local), [1.0]
    for count in counts[1:]:
        group = dist.new_group(list(range(count)))
        works = _shards(rounds, group, width) if rank() < count else (nothing, nothing)
        pairs = zip(*rounds.together(*works, rounds=_WAIT_ROUNDS), strict=True)
        took = statistics.median(sharded - whole for sharded, whole in pairs) / _LAYERS
        moved = width * width * rounds.dtype.itemsize * (count - 1) / count
        lines = [rates[kind][count - 1] for kind in ("all_gather", "reduce_scatter")]
        expected = sum(start * math.log2(count) + moved / rate for start, rate in lines)
        factors.append(max(1.0, took / expected))
    return tuple(np.interp(range(1, local + 1), counts, factors).tolist())


def _shards(
    rounds: Rounds, group: dist.ProcessGroup, width: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of layers of one token whose states a group shares; and of whole ones."""
    made = [
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
        for _ in range(2)
    ]
    shared, whole = (layers.to(rounds.device, rounds.dtype) for layers in made)
    mesh = DeviceMesh.from_group(group, rounds.device.type)
    for layer in (*shared, shared):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    token = rounds.tensor(1, width)

    def step(layers: nn.Module) -> None:
        layers(token).sum().backward()
        layers.zero_grad()

    return partial(step, shared), partial(step, whole)


def _layers(
    rounds: Rounds, group: dist.ProcessGroup, ranks: int, width: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call of some layers, forward and backward, with four collectives each; and without.

    Weights are DTensors of which a layer takes the local part, as those of `engine.tensor`.
    """
    plain = [rounds.tensor(width, width, grad=True) for _ in range(_LAYERS)]
    mesh = DeviceMesh.from_group(group, rounds.device.type)
    placed: list[Any] = [
        DTensor.from_local(w.detach(), mesh, [Replicate()]).requires_grad_() for w in plain
    ]
    part = rounds.tensor(4, width // ranks // 4, width, grad=True)

    def parallel() -> None:
        x = part
        for weight in placed:
            whole = gather_partial(x, 1, group)
            x = reduce_to_shards(F.linear(whole, weight.to_local()), 1, group)
        torch.autograd.grad(x.sum(), (part, *placed))

    def computing() -> None:
        x = part
        for weight in plain:
            x = F.linear(x.repeat(1, ranks, 1), weight)[:, : part.shape[1]]
        torch.autograd.grad(x.sum(), (part, *plain))

    return parallel, computing
