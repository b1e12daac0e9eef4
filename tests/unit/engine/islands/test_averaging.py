"""Islands that average: against the averager of torch.distributed, and where a round has parts."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import Parameter
from torch.optim import SGD

from lightning_par.engine.data.islands.options import Outer
from tests.support.islands import Island, serving, SHAPES, together

EVERY, STEPS = 3, 7


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}


def movement(rank: int, step: int, weight: Tensor) -> Tensor:
    """A step that depends on the own weight, so that it matters when weights are averaged."""
    return 0.1 * torch.sin((2 + rank) * weight + step)


def by_hand(store: dist.Store, rank: int) -> dict[str, Tensor]:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    # It averages after the first step that is not one of its warm-up, then every so many.
    averager = PeriodicModelAverager(EVERY, warmup_steps=EVERY - 1, process_group=group)
    held = {name: Parameter(weight) for name, weight in start().items()}
    optimizer = SGD(held.values(), lr=1.0)
    for step in range(STEPS):
        for weight in held.values():
            weight.grad = movement(rank, step, weight.detach())
        optimizer.step()
        averager.average_parameters(held.values())
    return {name: weight.detach() for name, weight in held.items()}


def as_island(island: Island) -> None:
    for step in range(STEPS):
        moved = {n: movement(island.number, step, w) for n, w in island.weights().items()}
        island.step(moved.__getitem__)


def test_averaging_equals_the_periodic_averager_of_torch() -> None:
    store, wanted = dist.HashStore(), [start(), start()]

    def average(rank: int) -> None:
        wanted[rank] = by_hand(store, rank)

    together(*(lambda rank=rank: average(rank) for rank in range(2)))
    outer = Outer(every=EVERY, optimizer="average", quantize="none", min_islands=2, timeout=60)
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        together(*(lambda island=island: as_island(island) for island in islands))
        for island, weights in zip(islands, wanted, strict=True):
            torch.testing.assert_close(island.weights(), weights, rtol=0, atol=1e-12)
            island.close()
    assert not torch.equal(wanted[0]["a"], wanted[1]["a"])  # the last step was not averaged


@pytest.mark.parametrize("optimizer", ["average", "sgd"])
def test_a_round_in_two_parts_makes_one_step(optimizer: Any) -> None:
    """Both from the same weights; the parameter server makes a step of every movement."""
    outer = Outer(every=1, optimizer=optimizer, quantize="none", grace=0, timeout=60)
    moved = [{n: movement(rank, 0, w) for n, w in start().items()} for rank in range(2)]
    part = 0.5 if optimizer == "average" else 1.0
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        for island in islands:
            island.step(moved[island.number].__getitem__)
            assert island.ranks[0].exchanges[-1].islands == [island.number]
        wanted = {n: w - part * (moved[0][n] + moved[1][n]) for n, w in start().items()}
        torch.testing.assert_close(islands[1].weights(), wanted, rtol=0, atol=1e-12)
        islands[0].close(finished=False)
        while len(server.meeting._members) == 2:  # until the server has seen that it is gone
            time.sleep(0.01)
        islands[1].step(moved[0].__getitem__)
        wanted = {n: w - moved[0][n] for n, w in wanted.items()}
        torch.testing.assert_close(islands[1].weights(), wanted, rtol=0, atol=1e-12)
        islands[1].close()
