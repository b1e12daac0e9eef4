"""Measures collectives and messages: their rates by kind and by ranks at work, and what collectives
wait in a layer.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
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

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "message")
"""Collectives, and a message from a rank to its neighbor."""
_MESSAGES = (12, 15, 18, 20)
"""Elements of collectives, as powers of two."""
_LAYERS, _COLLECTIVES = 4, 4
"""Layers whose collectives wait, and collectives of each, forward and backward."""
_SHARED_TOKENS = 256
"""Tokens of layers whose states are shared."""
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
    """A timed collective: its passes of a ring, the bytes that a rank sends, and seconds.

    A message is one of two ranks, as `seconds` are those of one.
    """

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
    # Without 1: a rank alone has nobody to talk to.
    counts = counts_at_work(local)[1:]
    if not counts:
        return None, {}
    rows: list[_Row] = []
    lines: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for count in counts:
        rows = [row for groups in _groupings(count, local) for row in _timed(rounds, groups)]
        for kind in KINDS:
            own = [row for row in rows if row.kind == kind]
            # The planner's start of a collective grows with the logarithm of its ranks.
            table = [[math.log2(row.ranks), row.moved] for row in own]
            start, inverse = fit_positive(table, [row.seconds for row in own])
            lines[kind].append((start, 1 / inverse))
    every = range(1, local + 1)
    rates = {}
    for kind, found in lines.items():
        # Between the counts that were measured, along a straight line.
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


@contextmanager
def _grouped(groups: Sequence[Sequence[int]]) -> Iterator[dist.ProcessGroup | None]:
    """Make groups of ranks, and give this rank's; None outside of them. All ranks call this.

    They are gone afterwards: threads of idle groups of gloo wake up again and again, and slow down
    what is measured next.
    """
    # By all ranks in the same order, as `new_group` is a collective of the world.
    made = [dist.new_group(list(ranks)) for ranks in groups]
    mine = [g for g, ranks in zip(made, groups, strict=True) if rank() in ranks]
    yield mine[0] if mine else None
    dist.barrier()  # no rank is still inside of a collective
    for group in mine:
        dist.destroy_process_group(group)


def _timed(rounds: Rounds, groups: list[list[int]]) -> list[_Row]:
    """Return the times of collectives in groups that work at the same time; all ranks call this."""
    rows = []
    with _grouped(groups) as mine:
        size = len(groups[0])
        for kind, passes, moved, work in _collectives(rounds, mine, size):
            # Ranks outside of the groups take part in the clock only.
            (times,) = rounds.together(nothing if mine is None else work)
            seconds = statistics.median(times)
            if kind == "message":
                rows.append(_Row(kind, 2, passes, moved, seconds / size))
            else:
                rows.append(_Row(kind, size, passes, moved, seconds))
    return rows


def _line(timed: list[_Row]) -> LinkMeasure:
    rows = [row for row in timed if row.kind != "message"]
    times = [row.seconds for row in rows]
    start, inverse = fit_positive([[row.passes, row.moved] for row in rows], times)
    errors = [abs(start * r.passes + inverse * r.moved - r.seconds) / r.seconds for r in rows]
    return LinkMeasure(start=start, rate=1 / inverse, error=statistics.mean(errors))


def _collectives(
    rounds: Rounds, group: Any, ranks: int
) -> Iterator[tuple[str, float, float, Callable[[], object]]]:
    """Yield collectives: kind, passes of a ring, bytes that a rank sends, and the call."""
    for exponent in _MESSAGES:
        # The same bytes for all kinds, whatever the number of ranks.
        part = rounds.tensor(2**exponent // ranks)
        whole = part.repeat(ranks)
        moved = whole.nbytes * (ranks - 1) / ranks
        yield "all_reduce", 2.0, 2 * moved, partial(all_reduce, whole, group)
        yield "all_gather", 1.0, moved, partial(all_gather, part, 0, group)
        yield "reduce_scatter", 1.0, moved, partial(reduce_scatter, whole, 0, group)
        yield "message", 1.0, float(part.nbytes), partial(_pass_round, part, group)


def _pass_round(x: Tensor, group: dist.ProcessGroup) -> None:
    """Send a tensor once round the group: as many messages as it has ranks, one after another."""
    place, size = group.rank(), group.size()
    before, after = (dist.get_global_rank(group, (place + i) % size) for i in (-1, 1))
    buffer = torch.empty_like(x)
    # The first rank begins, the others pass on what they got: so each message is alone.
    sent = dist.isend(x, after, group) if place == 0 else None
    received = dist.irecv(buffer, before, group)
    assert received is not None
    received.wait()
    sent = sent or dist.isend(x, after, group)
    assert sent is not None
    sent.wait()


def measure_waits(
    rounds: Rounds, local: int, rates: Rates, eager: float, width: int = 512
) -> tuple[float, ...]:
    """Return how much longer than in a loop a collective of a layer takes, while 1 to `local` ranks
    of a node are at work; less than 0 where cores that fall idle in the loop wake up late.

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

    def wait(group: dist.ProcessGroup | None, ranks: int, count: int) -> float:
        works = (nothing, nothing) if group is None else _layers(rounds, group, ranks, width)
        took = _longer(rounds, works) / (_LAYERS * _COLLECTIVES)
        moved = width // ranks // 4 * 4 * width * rounds.dtype.itemsize * (ranks - 1)
        # Half: one of the two per collective, all-gather or reduce-scatter.
        expected = _in_loop(rates, ranks, count, moved) / 2
        expected += 2 * width * width * rounds.dtype.itemsize / eager
        # A wait cannot take away more than the start of a collective.
        least = min(lines[count - 1][0] for kind, lines in rates.items() if kind != "message")
        return max(took - expected, -least)

    return _for_counts(local, 0.0, wait)


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

    def factor(group: dist.ProcessGroup | None, ranks: int, count: int) -> float:
        works = (nothing, nothing) if group is None else _shards(rounds, group, width)
        took = _longer(rounds, works) / _LAYERS
        moved = width * width * rounds.dtype.itemsize * (ranks - 1) / ranks
        return max(took, 0.0) / _in_loop(rates, ranks, count, moved)

    return _for_counts(local, 1.0, factor)


def _for_counts(
    local: int, alone: float, measured: Callable[[dist.ProcessGroup | None, int, int], float]
) -> tuple[float, ...]:
    """Return what was measured while 1 to `local` ranks of a node are at work.

    Args:
        local: Ranks of a node.
        alone: Of one rank.
        measured: Function of the group of this rank, if it is in one, of the size of the groups,
            and of the number of ranks at work; the mean over the ways to group them counts.
    """
    counts, found = counts_at_work(local), [alone]
    for count in counts[1:]:
        each = []
        for groups in _groupings(count, local):
            with _grouped(groups) as group:
                each.append(measured(group, len(groups[0]), count))
        found.append(statistics.mean(each))
    return tuple(np.interp(range(1, local + 1), counts, found).tolist())


def _longer(rounds: Rounds, works: tuple[Callable[[], object], Callable[[], object]]) -> float:
    """Return how many seconds longer the first of two works takes; they take turns."""
    # In turns, so that both see the same machine.
    pairs = zip(*rounds.together(*works, rounds=_WAIT_ROUNDS), strict=True)
    return float(statistics.median(first - second for first, second in pairs))


def _in_loop(rates: Rates, ranks: int, count: int, moved: float) -> float:
    """Return the seconds of an all-gather and a reduce-scatter in a loop of nothing else."""
    lines = [rates[kind][count - 1] for kind in ("all_gather", "reduce_scatter")]
    return sum(start * math.log2(ranks) + moved / rate for start, rate in lines)


def _shards(
    rounds: Rounds, group: dist.ProcessGroup, width: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of layers whose states a group shares; and of whole ones.

    As in a run, what they compute hides a part of what they exchange.
    """
    made = [
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
        for _ in range(2)
    ]
    shared, whole = (layers.to(rounds.device, rounds.dtype) for layers in made)
    mesh = DeviceMesh.from_group(group, rounds.device.type)
    # From the inside out, as FSDP2 wants it.
    for layer in (*shared, shared):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    tokens = rounds.tensor(_SHARED_TOKENS, width)

    def step(layers: nn.Module) -> None:
        layers(tokens).sum().backward()
        layers.zero_grad()

    return partial(step, shared), partial(step, whole)


def _layers(
    rounds: Rounds, group: dist.ProcessGroup, ranks: int, width: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call of some layers, forward and backward, with four collectives each; and without.

    Weights are DTensors of which a layer takes the local part, as those of `engine.tensor`: one for
    each collective, as in a block of a transformer.
    """
    inner = max(1, width // _COLLECTIVES)
    shapes = (*[(inner, width)] * (_COLLECTIVES - 1), (width, inner))
    plain = [[rounds.tensor(*shape, grad=True) for shape in shapes] for _ in range(_LAYERS)]
    mesh = DeviceMesh.from_group(group, rounds.device.type)
    placed: list[list[Any]] = [
        [DTensor.from_local(w.detach(), mesh, [Replicate()]).requires_grad_() for w in layer]
        for layer in plain
    ]
    part = rounds.tensor(4, width // ranks // 4, width, grad=True)

    def multiply(x: Tensor, layer: list[Tensor]) -> Tensor:
        *columns, rows = layer
        return F.linear(torch.stack([F.linear(x, w) for w in columns]).sum(0), rows)

    def parallel() -> None:
        x = part
        # [4, T / ranks / 4, D] to [4, T / 4, D] and back, as sequence parallelism does.
        for layer in placed:
            whole = gather_partial(x, 1, group)
            x = reduce_to_shards(multiply(whole, [w.to_local() for w in layer]), 1, group)
        torch.autograd.grad(x.sum(), (part, *chain(*placed)))

    def computing() -> None:
        x = part
        for layer in plain:
            x = multiply(x.repeat(1, ranks, 1), layer)[:, : part.shape[1]]
        torch.autograd.grad(x.sum(), (part, *chain(*plain)))

    return parallel, computing
