"""The samples of an island: one order on all islands, which do not talk about it."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from lightning_par.engine.rng import fork_all_rng, seed_all_generators, seed_of
from lightning_par.strategies.data.replica_batches import ReplicaBatches

__all__ = ["island_batches"]

_CPU = torch.device("cpu")
_WHY = "islands make equally many steps"


class _OrderOfEpoch:
    """A sampler, or a batch sampler, whose order follows from the seed and the epoch alone.

    An island that comes back in a later epoch has not drawn what the others have drawn. So all of
    them draw an epoch's order from the same seed, also of a generator that the sampler has.

    Args:
        given: The user's sampler or batch sampler, which has a length.
        told: The sampler that a Trainer tells the epoch.
    """

    def __init__(self, given: Any, told: Any) -> None:
        self._given, self._told, self._epoch = given, told, 0
        held = {getattr(sampler, "generator", None) for sampler in (given, told)}
        self._generators = {g: g.initial_seed() for g in held if isinstance(g, torch.Generator)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    @property
    def sampler(self) -> "_OrderOfEpoch":
        """What is told the epoch, where this is a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch, and tell it the user's sampler, if it wants to know."""
        self._epoch = epoch
        tell = getattr(self._told, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        # The draws of the order leave no trace in the run's own generators.
        with fork_all_rng(_CPU):
            seed_all_generators(seed_of(os.environ.get("PL_GLOBAL_SEED"), self._epoch), _CPU)
            for generator, seed in self._generators.items():
                generator.manual_seed(seed_of(seed, self._epoch))
            # All at once, inside of the context: later draws would come from the run's state.
            return iter(list(self._given))


def island_batches(given: Any, replicas: int, replica: int) -> ReplicaBatches:
    """Return a batch sampler of the samples of one replica of an island.

    Args:
        given: The user's batch sampler; or the sampler of a loader without one.
        replicas: Of all islands together.
        replica: Number of this one among them.
    """
    told = getattr(given, "sampler", given)
    if type(given) is BatchSampler:
        order: Any = _OrderOfEpoch(told, told)
        source: Any = BatchSampler(order, given.batch_size, given.drop_last)
    else:
        source = _OrderOfEpoch(given, told)
    return ReplicaBatches(
        source, replicas, replica, predicts=False, repeats=lambda: _WHY, agree=lambda: None
    )
