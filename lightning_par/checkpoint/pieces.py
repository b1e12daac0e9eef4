"""Local shards of global tensors, and which rank writes a shard that several ranks hold."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lightning_par.checkpoint.index import Chunk
from lightning_par.dtensor import Box, local_box, local_part

__all__ = ["Piece", "assign_writers", "cut_piece", "unbroken_runs"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a global tensor with its values.

    Attributes:
        box: Name, offset and shape of the box.
        global_shape: Shape of the global tensor.
        values: Entries of the box, of its shape, on any device.
    """

    box: Box
    global_shape: tuple[int, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.values.numel() * self.values.element_size()

    @property
    def is_shard_of_nothing(self) -> bool:
        """Whether the shard is empty although the global tensor is not."""
        # With more ranks than rows, the last ranks get none.
        return not self.values.numel() and bool(torch.Size(self.global_shape).numel())

    @property
    def key(self) -> str:
        """Key in a safetensors file: ``weight``, or ``weight[0:4, 8:16]`` for a part of it."""
        if self.box.shape == self.global_shape:
            return self.box.name
        # The box in the key, as Python writes a slice: two ranks' boxes of one weight never share
        # a key.
        ends = zip(self.box.offset, self.box.shape, strict=True)
        return f"{self.box.name}[{', '.join(f'{low}:{low + size}' for low, size in ends)}]"


def cut_piece(name: str, tensor: Tensor) -> Piece:
    """Return the local shard of a global tensor as a `Piece`.

    Args:
        name: Global FQN of the tensor.
        tensor: DTensor, or a tensor that every rank holds whole.

    Raises:
        CheckpointError: See `local_box`.
    """
    return Piece(local_box(name, tensor), tuple(tensor.shape), local_part(tensor))


def assign_writers(held: Sequence[Iterable[tuple[Box, int]]]) -> list[frozenset[Box]]:
    """Assign each box to one of the ranks that hold it, with balanced bytes per rank.

    Args:
        held: Boxes of every rank, each with its size in bytes.

    Returns:
        The boxes that each rank writes; deterministic, so every rank computes the same.
    """
    holders: dict[Box, list[int]] = {}
    sizes: dict[Box, int] = {}
    for rank, boxes in enumerate(held):
        for box, size in boxes:
            # Boxes are equal over replicas, as they hold the same slice of the same tensor.
            holders.setdefault(box, []).append(rank)
            sizes[box] = size
    load = [0] * len(held)
    assigned: list[set[Box]] = [set() for _ in held]
    # Greedy: boxes with one holder have no choice and come first, then large before small, each to
    # the rank with the least bytes so far. Names break ties, so that all ranks agree.
    order = sorted(holders, key=lambda b: (len(holders[b]), -sizes[b], b.name, b.offset))
    for box in order:
        rank = min(holders[box], key=lambda r: (load[r], r))
        load[rank] += sizes[box]
        assigned[rank].add(box)
    return [frozenset(boxes) for boxes in assigned]


def unbroken_runs(box: Box | Chunk, shape: tuple[int, ...]) -> tuple[Iterator[int], int]:
    """Return where the unbroken runs of a box begin in the whole tensor, and their length.

    Args:
        box: The box.
        shape: Shape of the whole tensor.

    Example: columns 2 and 3 of 4 of a matrix of 3 rows begin at 2, 6 and 10.
    """
    strides = [1] * len(shape)
    # In entries, row-major: `strides[d]` entries lie between neighbours of dim d.
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    # A run goes over all trailing dims that are whole, and over the part of the one before them.
    outer = len(shape)  # the dims before this one are walked through
    while outer and box.shape[outer:] == shape[outer:]:
        outer -= 1
    # Of the box's first entry.
    first = sum(low * stride for low, stride in zip(box.offset, strides, strict=True))
    steps = [range(0, n * s, s) for n, s in zip(box.shape[:outer], strides, strict=False)]
    return (first + sum(step) for step in product(*steps)), math.prod(box.shape[outer:])
