"""Data loaders of replicas: batches large enough to split, and as many on every rank."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.errors import ConfigurationError
from lightning_par.sizes import ParallelSizes, Size
from lightning_par.strategies.data.replica_batches import ReplicaBatches
from lightning_par.upstream.lightning import uses_distributed_sampler

View = Callable[[], AbstractContextManager[None]]

__all__ = ["EqualBatches", "check_loader", "join_ranks", "samples_differ"]

_SHOWN = 64  # entries of a tensor that tell samples apart


def check_loader(dataloader: object, num_microbatches: Size) -> None:
    """Refuse a data loader whose batches are smaller than the number of micro-batches.

    Raises:
        ConfigurationError: The loader's batch size is smaller than `num_microbatches`.
    """
    if num_microbatches == "auto" or not isinstance(dataloader, DataLoader):
        return
    size = dataloader.batch_size
    if size is not None and size < num_microbatches:
        raise ConfigurationError(
            "LP303",
            f"num_microbatches={num_microbatches}: a batch of {size} samples cannot be cut into "
            f"{num_microbatches} micro-batches. Use num_microbatches={size} or less, or "
            f"batch_size={num_microbatches} or more.",
        )


def join_ranks(dataloader: object, trainer: pl.Trainer, device: torch.device, view: View) -> object:
    """Return a loader that gives every rank the same number of batches, if it may not be so.

    Samples of sized datasets are divided so already. Predictions may differ in number.

    Args:
        dataloader: The user's data loader.
        trainer: Trainer whose loop runs.
        device: Device on which ranks agree.
        view: Surrounds the code of the loader.
    """
    distributed = uses_distributed_sampler(trainer)
    sized = isinstance(dataloader, DataLoader) and not isinstance(
        dataloader.dataset, IterableDataset
    )
    if trainer.world_size == 1 or (sized and (distributed or trainer.predicting)):
        return dataloader
    strategy: Any = trainer.strategy
    agrees_on = None if trainer.predicting else device
    is_stream = distributed and not sized
    sizes = strategy.processes.sizes if is_stream else None
    return EqualBatches(dataloader, agrees_on, view, sizes)  # type: ignore[arg-type]


class EqualBatches:
    """Gives every rank as many batches as the one that has least.

    A step communicates, hence a rank with more batches than the others would wait for ever.

    Args:
        dataloader: Data loader of this rank; every other attribute is that of the loader.
        device: Device on which ranks agree; None: ranks may have unequal numbers.
        view: Surrounds the code of the loader.
        sizes: Of the mesh, where nobody has divided the samples; else None.

    **Communicates**: one all-reduce of two numbers over all ranks, per batch; once a checksum.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        device: torch.device | None,
        view: View,
        sizes: ParallelSizes | None = None,
    ) -> None:
        self._dataloader, self._device, self._view = dataloader, device, view
        self._sizes = sizes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        end, count = object(), 0
        with self._view():
            batches = iter(self._dataloader)
        while True:
            with self._view():
                # A rank at its end asks again: an exhausted iterator keeps saying so.
                batch = next(batches, end)
            least = most = int(batch is not end)
            # Every rank gets here once per batch, with one or without: so none waits alone.
            if self._device is not None:
                least, most = _range_over_ranks(least, self._device)
            if not least:
                if most:
                    rank_zero_warn(
                        f"some ranks have only {count} batches, but others have more, so every "
                        f"rank stops after {count} batches. Give every rank the same number of "
                        "batches."
                    )
                return
            if self._sizes is not None and self._device is not None:
                # All ranks have a batch here, so all are in this collective.
                _tell_of_stream(batch, self._sizes)
                self._sizes = None
            count += 1
            yield batch


def _tell_of_stream(batch: Any, sizes: ParallelSizes) -> None:
    """Warn of a stream that is not divided among the replicas, or among other ranks, too.

    **Communicates**: a checksum of what the tensors of a batch begin with, over all ranks.
    """
    shown = [(t.shape, t.flatten()[:_SHOWN].tolist()) for t in tensors_of(batch)]
    checks: list[Any] = [None] * sizes.world_size
    dist.all_gather_object(checks, zlib.crc32(repr(shown).encode()) if shown else None)
    replicas: dict[int, set[Any]] = {}
    for rank, one in enumerate(checks):
        replicas.setdefault(sizes.data_rank(rank), set()).add(one)
    if None in checks:
        return
    divide = (
        "Divide the stream with trainer.strategy.distributed_sampler_kwargs, which holds rank and "
        "num_replicas of this replica; or make the stream in train_dataloader() or the other "
        "dataloader hooks, where rank and world size count replicas."
    )
    if any(len(of_replica) > 1 for of_replica in replicas.values()):
        rank_zero_warn(
            "the ranks of one replica get different samples from a stream (an IterableDataset, or "
            f"a loader that is no torch DataLoader). On {sizes} all ranks of a replica use the "
            f"batches of its first rank, so the samples of its other ranks are lost. {divide}"
        )
    elif sizes.data > 1 and len(set(checks)) == 1:
        rank_zero_warn(
            f"all {sizes.data} replicas get the same samples from a stream (an IterableDataset, "
            "or a loader that is no torch DataLoader), so each "
            f"sample is used {sizes.data} times. {divide}"
        )


def samples_differ(
    dataloader: object,
    device: torch.device,
    divided: ReplicaBatches | None = None,
    limit: int | float = 1.0,
) -> bool:
    """Whether some ranks have other numbers of samples or batches than others, or nobody knows.

    Args:
        dataloader: Data loader of this rank.
        device: Device on which ranks agree.
        divided: Its batch sampler, if that is one of a replica.
        limit: Batches of such a one that are used, or their share.

    **Communicates**: one all-reduce of two numbers over all ranks.
    """
    # Lightning notes the batches by a batch sampler, beside which `sampler` means nothing.
    held = getattr(dataloader, "batch_sampler", None)
    source: Any = dataloader if held is None else held
    try:
        count = len(source.sampler if divided is None else divided)
        if divided is not None:
            count = min(count, limit) if isinstance(limit, int) else int(count * limit)
    except (AttributeError, TypeError):
        count = -1
    least, most = _range_over_ranks(count, device)
    return least != most or least < 0


def _range_over_ranks(value: int, device: torch.device) -> tuple[int, int]:
    """Return the least and the largest value that a rank has."""
    # Both ends in one all-reduce: the least of -x is the negative of the largest x.
    ends = torch.tensor([value, -value], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    least, most = ends.tolist()
    return least, -most
