"""Data loaders of replicas: batches large enough to split, and as many on every rank."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.errors import ConfigurationError
from lightning_par.sizes import Size
from lightning_par.strategies.data.replica_batches import ReplicaBatches
from lightning_par.upstream.lightning import uses_distributed_sampler

View = Callable[[], AbstractContextManager[None]]

__all__ = ["EqualBatches", "check_loader", "join_ranks", "samples_differ"]


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
            f"num_microbatches={num_microbatches}: a batch of {size} samples cannot be cut into so "
            "many. Use "
            f"num_microbatches={size} or less, or batch_size={num_microbatches} or more.",
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
    agrees_on = None if trainer.predicting else device
    return EqualBatches(dataloader, agrees_on, view)  # type: ignore[arg-type]


class EqualBatches:
    """Gives every rank as many batches as the one that has least.

    A step communicates, hence a rank with more batches than the others would wait for ever.

    Args:
        dataloader: Data loader of this rank; every other attribute is that of the loader.
        device: Device on which ranks agree; None: ranks may have unequal numbers.
        view: Surrounds the code of the loader.

    **Communicates**: one all-reduce of two numbers over all ranks, per batch.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device | None, view: View) -> None:
        self._dataloader, self._device, self._view = dataloader, device, view

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
                batch = next(batches, end)
            least = most = int(batch is not end)
            if self._device is not None:
                least, most = _range_over_ranks(least, self._device)
            if not least:
                if most:
                    rank_zero_warn(
                        f"some ranks have no more than {count} batches while others have more; "
                        f"every rank stops after {count}. Give every rank the same number."
                    )
                return
            count += 1
            yield batch


def samples_differ(
    dataloader: object, device: torch.device, divided: ReplicaBatches | None = None
) -> bool:
    """Whether some ranks have other numbers of samples or batches than others, or nobody knows.

    Args:
        dataloader: Data loader of this rank.
        device: Device on which ranks agree.
        divided: Its batch sampler, if that is one of a replica.

    **Communicates**: one all-reduce of two numbers over all ranks.
    """
    # Lightning notes the batches by a batch sampler, beside which `sampler` means nothing.
    source: Any = getattr(dataloader, "batch_sampler", None) or dataloader
    try:
        count = len(source.sampler if divided is None else divided)
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
