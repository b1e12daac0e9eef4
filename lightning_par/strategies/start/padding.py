"""Whether padding weighs in the loss, where replicas pad their batches to other lengths.

Note [Padding]: a collate function pads to the longest row of a batch, and each replica collates its
own rows: one has 7 columns where another has 8, and one process would have 8 in all rows. That
changes nothing if the loss leaves padding out. So where replicas have other lengths, the step runs
on rows of the batch with and without some of their padding.
"""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_par.engine.batch import BatchDims, take_samples
from lightning_par.engine.experts.router_balance import own_balance
from lightning_par.engine.tensor_tree import map_tensors, tensors_of
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.modes import WithoutDropout
from lightning_par.strategies.start.uncut_batch import RunParts
from lightning_par.strategies.step.batch_weights import BatchWeigher, row_length

__all__ = ["PaddingLook", "difference_of"]


class PaddingLook:
    """Finds out whether padding weighs in the loss, see Note [Padding].

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        weigher: Compares the lengths of the replicas in every step, until it is known.
        tolerance: Gives the relative difference of losses that is rounding.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        weigher: BatchWeigher,
        tolerance: Callable[[], float],
    ) -> None:
        self._module, self._mesh = module, mesh
        self._weigher, self._tolerance = weigher, tolerance

    def check(self, batch: Any, dims: BatchDims, run: RunParts, *, draws: bool) -> None:
        """Refuse a step in whose loss padding weighs, if replicas have batches of other lengths.

        Args:
            batch: That of this replica.
            dims: Which entries have a batch dim.
            run: Runs the step on some samples.
            draws: Whether the step draws random numbers besides dropout: of that is warned.

        Raises:
            ConfigurationError: On every rank.

        **Communicates**: the lengths, over the replicas; then what the step does.
        """
        lengths = torch.tensor(float(row_length(batch)))
        ends = torch.stack([lengths, -lengths])
        group = self._mesh.data_group
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        if ends[0] == -ends[1]:
            return
        self._weigher.compares_lengths = False  # it is known from here on
        rows = [] if dims.size is None or dims.unsure else _rows_with_padding(batch, dims)
        cut = rows and _without_padding(take_samples(batch, dims, rows))
        # Every replica runs two parts: one that cannot cut its rows runs the same ones again.
        taken = take_samples(batch, dims, rows or [0]) if dims.size else batch
        parts = [(taken, len(rows) or 1), (cut or taken, len(rows) or 1)]
        difference = math.nan
        try:
            with WithoutDropout(), own_balance():
                seen, _ = run(parts, made=True)
            difference = difference_of(seen.losses) if cut else math.nan
        except ConfigurationError:  # the step does not take them, on any rank
            pass
        known = torch.tensor([difference if math.isfinite(difference) else -1.0])
        dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
        name = type(self._module).__name__
        if draws:
            rank_zero_warn(
                f"{name}.training_step draws random numbers, and the batches of replicas have "
                "different lengths, as each is padded to its own longest row. So the random "
                "numbers for tokens have the same distribution as in a run on one process, but "
                "other values. To draw the same numbers, pad all batches to one length in the "
                "collate_fn."
            )
        elif known < 0:
            rank_zero_warn(
                f"{name}.training_step: the batches of the replicas have different lengths, as "
                "each is padded to its own longest row. Whether the padding changes the loss could "
                "not be tested. If it does, pad all batches to one length in the collate_fn."
            )
        elif known > self._tolerance():
            raise ConfigurationError(
                "LP327",
                f"{name}.training_step: the batches of the replicas have different lengths, as "
                "each is padded to its own longest row, and the padding changes the loss: the "
                f"loss of the same rows with less padding differs by {100 * float(known):.2g} %. "
                "A run on one process pads all rows to one length. Exclude padding from the loss "
                "(ignore_index, or divide by the sum of a mask), or pad all batches to one length "
                "in the collate_fn, or use data_parallel_size=1. No weight was changed.",
            )


def _token_entries(batch: Any, length: int) -> list[Tensor]:
    return [t for t in tensors_of(batch) if t.ndim >= 2 and t.shape[1] == length]


def _length_of(batch: Any) -> int:
    """Return the number of columns of a batch: of whole numbers [B, T], else of what has dims."""
    entries = [tensor for tensor in tensors_of(batch) if tensor.ndim >= 2]
    whole = [t for t in entries if t.ndim == 2 and not t.is_floating_point()]
    return next((tensor.shape[1] for tensor in (*whole, *entries)), 0)


def _padding_of(batch: Any) -> int:
    """Return how many columns at the end of a batch are the same in all rows and columns."""
    entries = _token_entries(batch, _length_of(batch))
    found = [_equal_columns(tensor) for tensor in entries]
    # One column of it stays, so that the rows keep some padding.
    return max(0, min(found, default=0) - 1)


def _equal_columns(tensor: Tensor) -> int:
    """Return how many columns at the end of a tensor [B, T, ...] hold one value."""
    columns = tensor.detach().transpose(0, 1).flatten(1)
    is_same = (columns == columns[-1:, :1]).all(1).flip(0)
    return int(is_same.long().cumprod(0).sum())


def _rows_with_padding(batch: Any, dims: BatchDims) -> list[int]:
    """Return up to two rows that have the most padding; empty if none has any."""
    assert dims.size is not None
    amounts = [_padding_of(take_samples(batch, dims, [row])) for row in range(min(dims.size, 16))]
    order = sorted(range(len(amounts)), key=lambda row: -amounts[row])
    return sorted(row for row in order[:2] if amounts[row])


def _without_padding(batch: Any) -> Any:
    """Return a batch without columns at its end that hold padding only; None: it has none."""
    count, length = _padding_of(batch), _length_of(batch)
    if not count:
        return None
    kept = length - count

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != length:
            return tensor
        # A mask [B, T, T] has tokens in two dims.
        both = tensor.ndim >= 3 and tensor.shape[2] == length
        return tensor[:, :kept, :kept] if both else tensor[:, :kept]

    return map_tensors(batch, cut)


def difference_of(losses: list[tuple[float, ...]]) -> float:
    """Return how far the losses of two batches are apart, of the larger one."""
    if len(losses) != 2 or len(losses[0]) != len(losses[1]) or not losses[0]:
        return math.nan
    apart: list[float] = [
        abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in zip(*losses, strict=True)
    ]
    return max(apart)
