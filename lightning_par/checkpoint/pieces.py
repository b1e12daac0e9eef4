"""What a rank holds of every tensor, and which of the ranks that hold the same writes it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.dtensor import Box, local_box, local_part

__all__ = ["Piece", "cut_piece", "share_out"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a named tensor with its values.

    Attributes:
        box: Which part.
        global_shape: Of the whole.
        values: On any device.
    """

    box: Box
    global_shape: tuple[int, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return self.values.numel() * self.values.element_size()

    @property
    def is_shard_of_nothing(self) -> bool:
        """Whether this rank holds no entry of a tensor that has some."""
        return not self.values.numel() and bool(torch.Size(self.global_shape).numel())

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's, and the slices unless it is the whole."""
        if self.box.shape == self.global_shape:
            return self.box.name
        ends = zip(self.box.offset, self.box.shape, strict=True)
        return f"{self.box.name}[{', '.join(f'{low}:{low + size}' for low, size in ends)}]"


def cut_piece(name: str, tensor: Tensor) -> Piece:
    """Return what this rank holds of a named tensor.

    Raises:
        CheckpointError: See `local_box`.
    """
    return Piece(local_box(name, tensor), tuple(tensor.shape), local_part(tensor))


def share_out(held: Sequence[Iterable[tuple[Box, int]]]) -> list[frozenset[Box]]:
    """Let every box be written by one of the ranks that hold it, so that all write about as much.

    Args:
        held: For every rank its boxes, and their sizes in bytes.

    Returns:
        For every rank the boxes that it writes; the same on every rank that computes it.
    """
    holders: dict[Box, list[int]] = {}
    sizes: dict[Box, int] = {}
    for rank, boxes in enumerate(held):
        for box, size in boxes:
            holders.setdefault(box, []).append(rank)
            sizes[box] = size
    load = [0] * len(held)
    mine: list[set[Box]] = [set() for _ in held]
    order = sorted(holders, key=lambda b: (len(holders[b]), -sizes[b], b.name, b.offset))
    for box in order:  # those without a choice come first
        rank = min(holders[box], key=lambda r: (load[r], r))
        load[rank] += sizes[box]
        mine[rank].add(box)
    return [frozenset(boxes) for boxes in mine]
