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
from lightning_par.models.token_data import PADDING

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
    """

    _seen = 0
    _resume: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is enough
        # A generator: nothing runs before the first batch is asked for. The Trainer creates the
        # iterator before it tells the sampler the epoch, and workers would prefetch the previous
        # epoch's order.
        sampler = self.sampler
        if not isinstance(sampler, ReplicaSampler):
            yield from super().__iter__()
            return
        self._seen = 0
        if self._resume is not None and self._resume[0] == sampler.epoch:
            self._seen = self._resume[1]
        sampler.start = self._seen // sampler.num_replicas
        for batch in super().__iter__():
            self._resume, sampler.start = None, 0
            self._seen = min(self._seen + self._global_batch, sampler.total_size)
            yield batch

    @property
    def _global_batch(self) -> int:
        sampler = self.sampler
        assert isinstance(sampler, ReplicaSampler)
        return (self.batch_size or 1) * sampler.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last batch that was handed out; the same on every replica."""
        sampler = self.sampler
        if not isinstance(sampler, ReplicaSampler):
            return {}
        if self._resume is not None:  # loaded, and nothing handed out since
            epoch, seen = self._resume
        else:
            epoch, seen = sampler.epoch, self._seen
        return {"epoch": epoch, "samples": seen, "global_batch_size": self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a place.

        If the global batch size has changed, the epoch goes on with the first sample that was not
        seen, but the Trainer's own count of batches in this epoch no longer fits; a warning says
        so.

        Args:
            state: From `state_dict`, of a run with any number of replicas.

        Raises:
            ConfigurationError: The number of samples seen does not divide by the number of
                replicas.
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
        self._resume = (state["epoch"], seen)
        sampler.set_epoch(state["epoch"])
