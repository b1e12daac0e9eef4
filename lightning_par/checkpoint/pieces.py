"""Local shards of global tensors, and which rank writes a shard that several ranks hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_par.errors import CheckpointError

__all__ = ["Box", "Piece", "assign_writers", "cut_box", "cut_piece", "local_box", "local_part"]


@dataclass(frozen=True)
class Box:
    """A part of a named tensor.

    Attributes:
        name: Global.
        offset: First entry in every dim of the global tensor.
        shape: Of the part.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


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
        ends = zip(self.box.offset, self.box.shape, strict=True)
        return f"{self.box.name}[{', '.join(f'{low}:{low + size}' for low, size in ends)}]"


def local_box(name: str, tensor: Tensor) -> Box:
    """Return which part of the global tensor this rank holds: of a DTensor its shard, else all.

    A dim that tensor parallelism and then the replicas shard is cut in that order, although the
    mesh names the replicas first: there, DTensor calls their cut a strided shard.

    Args:
        name: Global.
        tensor: If it is a DTensor, sharded as `torch.chunk` does.

    Raises:
        CheckpointError: The DTensor is sharded in another way.
    """
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.ndim, tuple(tensor.shape))
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    shards = [(i, p) for i, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    shards.sort(key=lambda shard: type(shard[1]) is not Shard)  # strided ones were made last
    cuts = [(p.dim, mesh.size(i), place[i]) for i, p in shards]
    box = cut_box(name, tuple(tensor.shape), cuts)
    held = tuple(tensor.to_local().shape)
    if 0 in held and 0 in box.shape:
        return Box(name, box.offset, held)  # nothing has many shapes
    if held != box.shape:
        raise CheckpointError(
            f"{name} holds {held} of {tuple(tensor.shape)} here, but its placements "
            f"{tensor.placements} on {tuple(mesh.shape)} ranks would be {box.shape}."
        )
    return box


def cut_box(name: str, shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """Return what is left of a tensor after it was cut as `torch.chunk` does, again and again.

    Args:
        name: Of the tensor.
        shape: Of the whole.
        cuts: Each a dim, into how many parts, and which of them is kept.

    Example:
        >>> cut_box("w", (7, 5), [(0, 2, 1), (0, 2, 0)])
        Box(name='w', offset=(4, 0), shape=(2, 5))
    """
    left, offset = list(shape), [0] * len(shape)
    for dim, count, index in cuts:
        each = -(-left[dim] // count)
        low = min(each * index, left[dim])
        offset[dim] += low
        left[dim] = min(each, left[dim] - low)
    return Box(name, tuple(offset), tuple(left))


def local_part(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


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
