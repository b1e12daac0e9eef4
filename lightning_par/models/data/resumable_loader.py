"""Distributed sampler and stateful data loader, which resumes in the middle of an epoch.

Note [Global order]: there is one permutation of the samples per (seed, epoch), from which replica r
of R takes the samples r, r + R, r + 2R ... The k-th batches of all replicas together are therefore
the k-th B*R samples of the permutation: the global batch depends on B*R and not on R.
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
    """Sampler of one replica; all replicas get equally many samples. See Note [Global order].

    It is a `DistributedSampler`, so that the Trainer does not replace it by one of its own.

    Args:
        dataset: Dataset with a length.
        num_replicas: R, the number of model replicas; ranks that hold shards of one model are one
            replica.
        rank: Index of this rank's replica, 0 .. R - 1.
        shuffle: Whether every epoch has another permutation.
        seed: Seed of the permutations; the same on all ranks.
        drop_last: Whether the last samples are dropped so that R divides their number; otherwise
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
        """Number of this replica's samples that the next iteration skips at its beginning."""

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._count, generator=generator)
        else:
            order = torch.arange(self._count)
        mine = order[: self.total_size][self.rank :: self.num_replicas]
        # In chunks: a list of Python ints of the whole order would take 8 times its memory.
        for low in range(self.start, len(mine), _CHUNK):
            yield from mine[low : low + _CHUNK].tolist()
        yield from [PADDING] * (self.num_samples - max(self.start, len(mine)))


class ResumableLoader(DataLoader[_T_co]):
    """Stateful `DataLoader`: its state is the epoch and the samples that all replicas have seen.

    The Trainer stores `state_dict` in checkpoints. A resumed epoch skips the samples that were
    seen, without loading them, and keeps its full length, as the Trainer expects. Batches that
    workers have prefetched do not count as seen. Takes the arguments of `DataLoader`, with a
    `ReplicaSampler`; if the Trainer has replaced that (``overfit_batches``), it is an ordinary
    loader.

    Note [Own epochs]: the loader counts epochs itself and takes the Trainer's count only at the
    start. A run that stops at ``max_steps`` in the middle of an epoch is stored as if the epoch
    were over; by the Trainer's count, a longer run would then skip the rest of it.

    Attributes:
        batches_per_epoch: Number of batches after which the Trainer ends an epoch
            (``limit_train_batches``); None: all.
    """

    batches_per_epoch: int | None = None
    _position: tuple[int, int] | None = None
    _started = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is enough
        # Nothing runs before the first batch is asked for: the Trainer creates the iterator before
        # it tells a new sampler the epoch, and workers would prefetch the wrong order.
        sampler = self.sampler
        if not isinstance(sampler, ReplicaSampler):
            yield from super().__iter__()
            return
        epoch, seen = self._position or (sampler.epoch, 0)
        if self._started:  # a new iteration abandons the rest of the previous one
            epoch, seen = epoch + 1, 0
        epoch, seen = self._whole_epochs(epoch, seen)
        sampler.set_epoch(epoch)
        sampler.start = seen // sampler.num_replicas
        with torch.random.fork_rng(devices=[], enabled=seen > 0):
            # DataLoader draws a base seed here. The interrupted run drew it at the epoch's start,
            # so the resumed one must leave the generator as it is.
            batches = super().__iter__()
        for batch in batches:
            sampler.start = 0
            self._started = True
            seen = min(seen + self._global_batch, sampler.total_size)
            self._position = (epoch, seen)
            yield batch

    def _whole_epochs(self, epoch: int, seen: int) -> tuple[int, int]:
        """Return (epoch, samples seen), moved to the next epoch if this one is over."""
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
        """Return the position after the last batch that was yielded; the same on every replica."""
        if not isinstance(self.sampler, ReplicaSampler):
            return {}
        epoch, seen = self._whole_epochs(*(self._position or (self.sampler.epoch, 0)))
        return {"epoch": epoch, "samples": seen, "global_batch_size": self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a stored position.

        If the global batch size has changed, the epoch goes on with the first unseen sample, but
        the Trainer's count of batches in this epoch no longer fits, of which a warning tells.

        Args:
            state: `state_dict` of a run with any number of replicas.

        Raises:
            ConfigurationError: The number of samples seen is not a multiple of the number of
                replicas.
        """
        sampler = self.sampler
        if not state or not isinstance(sampler, ReplicaSampler):
            return
        seen = min(state["samples"], sampler.total_size)
        if seen % sampler.num_replicas:
            raise ConfigurationError(
                "LP512",
                f"the run had trained on {seen} samples of its epoch when the checkpoint was "
                f"saved, which {sampler.num_replicas} replicas cannot divide equally. Resume from "
                "a checkpoint at the end of an epoch, or with a number of replicas that divides "
                f"{seen}.",
            )
        if state["global_batch_size"] != self._global_batch:
            _log.warning(
                "The global batch had %d samples when the checkpoint was written and has %d now; "
                "the current epoch may therefore end early.",
                state["global_batch_size"],
                self._global_batch,
            )
        self._position, self._started = (state["epoch"], seen), False
