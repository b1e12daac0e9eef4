"""The order in which islands take samples: that of the seed and the epoch, whatever was drawn."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_par.strategies.data.island_order import island_batches

_DATA: Any = range(24)


class Drawn(Sampler[list[int]]):
    """Batches of three samples, which are drawn while they are iterated."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(8):
            yield torch.randint(24, (3,)).tolist()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


SAMPLERS: dict[str, Any] = {
    "random": lambda: BatchSampler(RandomSampler(_DATA), 3, False),
    "replaced": lambda: BatchSampler(RandomSampler(_DATA, replacement=True), 3, False),
    "generator": lambda: BatchSampler(RandomSampler(_DATA, generator=_generator()), 3, True),
    "weighted": lambda: BatchSampler(WeightedRandomSampler(torch.ones(24), 24), 3, False),
    "epoch": lambda: BatchSampler(DistributedSampler(_DATA, 1, 0), 3, False),
    "batches": Drawn,
}


def _epochs(make: Any, island: int, epochs: list[int], draws: int) -> list[list[Any]]:
    """Return the batches of an island in these epochs, among which it draws numbers of its own."""
    seed_everything(5, verbose=False)
    batches = island_batches(make(), 2, island)
    found = []
    for epoch in epochs:
        torch.rand(draws)
        batches.sampler.set_epoch(epoch)
        found.append(list(batches))
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_island_that_comes_back_takes_the_part_that_the_others_leave(name: str) -> None:
    make = SAMPLERS[name]
    first = _epochs(make, 0, [0, 1, 2], draws=1)
    other = _epochs(make, 1, [0, 1, 2], draws=0)
    assert _epochs(make, 1, [2], draws=5) == other[2:]
    assert first[0] != first[1] != first[2]
    for epoch, (mine, theirs) in enumerate(zip(first, other, strict=True)):
        assert len(mine) == len(theirs) == 4
        both = sorted(sample for batch in [*mine, *theirs] for sample in batch)
        alone = [s for batch in _epochs(make, 0, [epoch], 2)[0] for s in batch]
        assert sorted(s for batch in mine for s in batch) == sorted(alone)
        if name in ("random", "generator", "epoch"):
            assert both == list(_DATA)


def test_an_order_of_the_users_stays_and_nothing_that_is_drawn_changes() -> None:
    batches = island_batches(BatchSampler(SequentialSampler(_DATA), 2, False), 2, 1)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    assert [batch[0] for batch in batches] == list(range(1, 24, 4))
    assert torch.equal(torch.rand(2), wanted)
