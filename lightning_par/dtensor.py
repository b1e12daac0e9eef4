"""Which part of a DTensor this rank holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_par.errors import CheckpointError
from lightning_par.upstream.dtensor import sharded_like

__all__ = ["Box", "box_at", "cut_box", "local_box", "local_part", "shard_of", "whole"]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a named tensor.

    Attributes:
        name: Name of the tensor, the same on every rank.
        offset: Index of the part's first entry in every dim of the global tensor.
        shape: Shape of the part.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def local_box(name: str, tensor: Tensor) -> Box:
    """Return which part of a tensor this rank holds: the shard of a DTensor, else the whole.

    A dim that is sharded by tensor parallelism and by FSDP is cut in this order, although ``tp`` is
    the inner axis of the mesh: DTensor calls the cut of FSDP a strided shard.

    Args:
        name: Name of the tensor, the same on every rank.
        tensor: Any tensor; a DTensor has to be sharded as `torch.chunk` does.

    Raises:
        CheckpointError: The DTensor is sharded in another way.
    """
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.ndim, tuple(tensor.shape))
    mesh = tensor.device_mesh
    box = box_at(name, tensor.shape, mesh, tensor.placements)
    held = tuple(tensor.to_local().shape)
    if 0 in held and 0 in box.shape:
        return Box(name, box.offset, held)  # an empty shard may differ in its other dims
    if held != box.shape:
        raise CheckpointError(
            "LP505",
            f"{name} holds {held} of {tuple(tensor.shape)} here, but its placements "
            f"{tensor.placements} on {tuple(mesh.shape)} ranks would be {box.shape}.",
        )
    return box


def box_at(
    name: str, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> Box:
    """Return which part of a tensor this rank would hold.

    Args:
        name: Name of the tensor, the same on every rank.
        shape: Global shape.
        mesh: The ranks that hold it.
        placements: How it is placed on each axis of `mesh`.

    Raises:
        CheckpointError: A rank would hold several strips of a dim.
    """
    place = mesh.get_coordinate()
    assert place is not None
    shards: list[tuple[int, Any]] = [(i, p) for i, p in enumerate(placements) if hasattr(p, "dim")]
    shards.sort(key=lambda shard: type(shard[1]) is not Shard)  # strided ones were made last
    plain = {p.dim for _, p in shards if type(p) is Shard}
    if any(p.dim not in plain for _, p in shards):  # nothing was cut before: these are strips
        raise CheckpointError(
            "LP505",
            f"{name} is sharded as {tuple(placements)}: a rank holds several strips of a dim, not "
            "one block. Keep the weight whole, or store it with a dim of its own for the strips.",
        )
    return cut_box(name, shape, [(p.dim, mesh.size(i), place[i]) for i, p in shards])


def cut_box(name: str, shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """Return the part that remains after cuts by `torch.chunk`, one after the other.

    Args:
        name: Name of the tensor.
        shape: Global shape.
        cuts: For each cut the dim, the number of chunks, and the index of the chunk that is kept.

    Examples:
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
    """Return the shard of a DTensor, else the tensor; detached, with the same memory.

    Args:
        tensor: Any tensor; changes in place are seen through both (they share the version counter).
    """
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its entries, the same on every rank that holds a part of it.

    **Communicates**: all-gathers over the axes on which it is sharded, or sums what is partial.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor as `like` is sharded.

    Args:
        tensor: The whole value, of the shape of `like`, the same on every rank.
        like: A plain tensor, then `tensor` is returned; or a DTensor.
    """
    if not isinstance(like, DTensor):
        return tensor
    box = local_box("tensor", like)
    for dim, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, low, size)
    return sharded_like(tensor.clone(), like)
