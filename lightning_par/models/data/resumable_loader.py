"""Which samples each replica sees, in which order, and how a run finds its place again.

Note [Global order]: one permutation of the samples per (seed, epoch), from which replica r of R
takes the samples r, r + R, r + 2R ... The k-th batches of all replicas together are therefore the
k-th B*R samples of the permutation: the global batch, and so the run, depends on B*R and not on R.
"""

import logging
from collections.abc import Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_par.errors import ConfigurationError
from lightning_par.models.data.token_windows import PADDING

__all__ = ["ReplicaSampler", "ResumableLoader"]

_T_co = TypeVar("_T_co", covariant=True)
_CHUNK = 65_536

_log = logging.getLogger(__name__)


class ReplicaSampler(DistributedSampler[Any]):
    """The samples of one replica; every replica gets the same number. See Note [Global order].

    It is a `DistributedSampler`, which the Trainer never replaces by one of its own.

    Args:
        dataset: Anything with a length.
        num_replicas: R. Ranks that hold parts of one copy of the model are one replica.
        rank: Which replica, 0 .. R - 1.
        shuffle: Whether every epoch has another order.
        seed: Of the order; the same on all ranks.
        drop_last: Leave out up to R - 1 samples, so that R divides what is left. Otherwise
            `PADDING` fills up.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        assert isinstance(dataset, Sized)
        self._count = len(dataset)
        self.num_samples = self._count // num_replicas
        if not drop_last and self._count % num_replicas:
            self.num_samples += 1
        self.total_size = self.num_samples * num_replicas
        self.start = 0
        """How many of this replica's samples the next iteration leaves out at its beginning."""

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._count, generator=generator)
        else:
            order = torch.arange(self._count)
        mine = order[: self.total_size][self.rank :: self.num_replicas]
        for low in range(self.start, len(mine), _CHUNK):  # never the whole order as Python ints
            yield from mine[low : low + _CHUNK].tolist()
        yield from [PADDING] * (self.num_samples - max(self.start, len(mine)))


class ResumableLoader(DataLoader[_T_co]):
    """A `DataLoader` that knows its place: epoch, and samples that all replicas together have seen.

    The Trainer stores `state_dict` in checkpoints. An epoch that goes on after a resume leaves out
    what was seen, without loading it, and keeps its full length, as the Trainer expects. Batches
    that workers have prefetched do not count as seen. Takes the arguments of `DataLoader`; needs a
    `ReplicaSampler`, except that one put in its place by the Trainer (``overfit_batches``) makes it
    an ordinary loader.

    Note [Own epochs]: the loader counts epochs itself and takes the Trainer's count only to begin
    with. A run that stops at ``max_steps`` in the middle of an epoch is stored as if the epoch were
    over; by the Trainer's count, a longer run would then skip the rest of it.

    Attributes:
        batches_per_epoch: Where the Trainer ends an epoch early (``limit_train_batches``).
    """

    batches_per_epoch: int | None = None
    _place: tuple[int, int] | None = None
    _started = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is enough
        # Nothing runs before the first batch is asked for: the Trainer creates the iterator before
        # it tells a new sampler the epoch, and workers would prefetch the wrong order.
        sampler = self.sampler
        if not isinstance(sampler, ReplicaSampler):
            yield from super().__iter__()
            return
        epoch, seen = self._place or (sampler.epoch, 0)
        if self._started:  # what was left of the previous iteration is given up
            epoch, seen = epoch + 1, 0
        epoch, seen = self._whole_epochs(epoch, seen)
        sampler.set_epoch(epoch)
        sampler.start = seen // sampler.num_replicas
        with torch.random.fork_rng(devices=[], enabled=seen > 0):
            # At its start, the epoch drew a number here; a run that resumes must not draw another.
            batches = super().__iter__()
        for batch in batches:
            sampler.start = 0
            self._started = True
            seen = min(seen + self._global_batch, sampler.total_size)
            self._place = (epoch, seen)
            yield batch

    def _whole_epochs(self, epoch: int, seen: int) -> tuple[int, int]:
        """Return the place as the beginning of the next epoch if the epoch is over."""
        length = len(self)
        if self.batches_per_epoch is not None:
            length = min(length, self.batches_per_epoch)
        assert isinstance(self.sampler, ReplicaSampler)
        whole = min(length * self._global_batch, self.sampler.total_size)
        return (epoch + 1, 0) if seen >= whole else (epoch, seen)

    @property
    def _global_batch(self) -> int:
        assert isinstance(self.sampler, ReplicaSampler)
        return (self.batch_size or 1) * self.sampler.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last batch that was handed out; the same on every replica."""
        if not isinstance(self.sampler, ReplicaSampler):
            return {}
        epoch, seen = self._whole_epochs(*(self._place or (self.sampler.epoch, 0)))
        return {"epoch": epoch, "samples": seen, "global_batch_size": self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a place.

        If the global batch size has changed, the epoch goes on with the first sample that was not
        seen, but the Trainer's own count of batches in this epoch no longer fits; a warning says
        so.

        Args:
            state: From `state_dict`, of a run with any number of replicas.

        Raises:
            ConfigurationError: The samples seen do not divide by the number of replicas.
        """
        sampler = self.sampler
        if not state or not isinstance(sampler, ReplicaSampler):
            return
        seen = min(state["samples"], sampler.total_size)
        if seen % sampler.num_replicas:
            raise ConfigurationError(
                f"the checkpoint has seen {seen} samples of its epoch, which "
                f"{sampler.num_replicas} replicas cannot share; resume from a checkpoint at the "
                "end of an epoch."
            )
        if state["global_batch_size"] != self._global_batch:
            _log.warning(
                "The global batch had %d samples when the checkpoint was written and has %d now; "
                "the current epoch may end early.",
                state["global_batch_size"],
                self._global_batch,
            )
        self._place, self._started = (state["epoch"], seen), False
