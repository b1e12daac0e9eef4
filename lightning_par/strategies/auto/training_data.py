"""What the data of a fit say of its step before the first batch: its samples and their tokens."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_par.engine.batch import batch_entry, has_entry, sequence_entries
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.inference.forked import ForkError, run_forked
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.setup.inferred_plan import loaders_of
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["TrainingData", "look_at_data"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The batches of a replica, as far as they can be known.

    Attributes:
        batch_size: Samples of a batch; None: its loader does not say.
        samples: Of an epoch; None: the loader does not say.
        length: T, the most tokens of the samples looked at; None: they cannot be looked at.
        is_even: Whether all of these have as many.
    """

    batch_size: int | None = None
    samples: int | None = None
    length: int | None = None
    is_even: bool = False


def look_at_data(
    trainer: pl.Trainer, module: pl.LightningModule, layout: BatchLayout
) -> TrainingData:
    """Look at the loader of the training data, and at its first, middle and last sample.

    That happens in a fork of this process: no loader or random state of the run moves.

    Args:
        trainer: Its data are set up.
        module: The user's module.
        layout: Where the tokens of a batch are; if it says nothing, they are dim 1 of integers.
    """
    try:
        return run_forked(lambda: _look(trainer, module, layout))
    except ForkError:
        # The fork died or took too long, e.g. as a dataset uses CUDA.
        return TrainingData()


def _look(trainer: pl.Trainer, module: pl.LightningModule, layout: BatchLayout) -> TrainingData:
    size, samples, lengths = None, None, list[int]()
    try:
        loader = next(iter(tree_leaves(loaders_of(trainer, module))), None)
        size = getattr(loader, "batch_size", None)
        if size is None:  # a sampler that gives whole batches may know
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        dataset = getattr(loader, "dataset", None)
        # A stream has no samples to look at without taking them.
        if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
            samples = len(dataset)
            lengths = list(_lengths(loader, samples, layout))
    except Exception:  # of a loader or dataset of the user; the run will meet it again
        pass
    return TrainingData(
        batch_size=size if isinstance(size, int) else None,
        samples=samples,
        length=max(lengths, default=None),
        is_even=len({*lengths}) == 1,
    )


def _lengths(loader: Any, samples: int, layout: BatchLayout) -> Iterator[int]:
    for index in sorted({0, samples // 2, samples - 1}):
        # As the loader makes it, but of one sample: [1, T].
        batch = loader.collate_fn([loader.dataset[index]])
        if layout.sequence_dims:
            entries = sequence_entries(batch, layout).items()
            found = [batch_entry(batch, e).shape[dim] for e, dim in entries if has_entry(batch, e)]
        else:
            found = [tensor.shape[1] for tensor in tensors_of(batch) if _counts(tensor)]
        if found:
            yield max(found)


def _counts(tensor: Tensor) -> bool:
    """Whether a tensor is one of numbers of tokens, [1, T]."""
    return tensor.ndim == 2 and tensor.dtype in (torch.int32, torch.int64)
