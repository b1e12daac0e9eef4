"""Replicas with unequal numbers of batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.upstream.lightning import uses_distributed_sampler

__all__ = ["EqualBatches", "join_ranks", "samples_differ"]


def join_ranks(dataloader: object, trainer: pl.Trainer, device: torch.device) -> object:
    """Return a loader that gives every rank the same number of batches, if it may not be so.

    Lightning divides the samples of sized datasets equally. Predictions may differ in number.

    Args:
        dataloader: The user's.
        trainer: Its loop is the one that runs.
        device: Where ranks agree.
    """
    divided = uses_distributed_sampler(trainer)
    sized = isinstance(dataloader, DataLoader) and not isinstance(
        dataloader.dataset, IterableDataset
    )
    if trainer.world_size == 1 or trainer.predicting or (sized and divided):
        return dataloader
    return EqualBatches(dataloader, device)  # type: ignore[arg-type]


class EqualBatches:
    """Gives every rank as many batches as the one that has least.

    A step communicates, hence a rank with more batches than the others would wait for ever.

    Args:
        dataloader: Of this rank; every other attribute is that of the loader.
        device: Where ranks agree.

    **Communicates**: one all-reduce of two numbers over all ranks, per batch.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device) -> None:
        self._dataloader, self._device = dataloader, device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches, end, count = iter(self._dataloader), object(), 0
        while True:
            batch = next(batches, end)
            least, most = _range_over_ranks(int(batch is not end), self._device)
            if not least:
                if most:
                    rank_zero_warn(
                        f"some ranks have no more than {count} batches while others have more; "
                        f"every rank stops after {count}. Give every rank the same number."
                    )
                return
            count += 1
            yield batch


def samples_differ(dataloader: object, device: torch.device) -> bool:
    """Whether some ranks have other numbers of samples than others, or nobody knows.

    Args:
        dataloader: Of this rank.
        device: Where ranks agree.

    **Communicates**: one all-reduce of two numbers over all ranks.
    """
    # Lightning divides the samples by a batch sampler, beside which `sampler` means nothing.
    source: Any = getattr(dataloader, "batch_sampler", None) or dataloader
    try:
        count = len(source.sampler)
    except (AttributeError, TypeError):
        count = -1
    least, most = _range_over_ranks(count, device)
    return least != most or least < 0


def _range_over_ranks(value: int, device: torch.device) -> tuple[int, int]:
    """Return the least and the largest value that a rank has."""
    ends = torch.tensor([value, -value], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    least, most = ends.tolist()
    return least, -most
