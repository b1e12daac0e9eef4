"""Which part of a DTensor this rank holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_par.errors import CheckpointError

__all__ = ["Box", "cut_box", "local_box", "local_part"]


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
    place = mesh.get_coordinate()
    assert place is not None
    shards = [(i, p) for i, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    shards.sort(key=lambda shard: type(shard[1]) is not Shard)  # strided ones were made last
    plain = {p.dim for _, p in shards if type(p) is Shard}
    if any(p.dim not in plain for _, p in shards):  # nothing was cut before: these are strips
        raise CheckpointError(
            f"{name} is sharded as {tensor.placements}: a rank holds several strips of a dim, not "
            "one block. Keep the weight whole, or store it with a dim of its own for the strips."
        )
    cuts = [(p.dim, mesh.size(i), place[i]) for i, p in shards]
    box = cut_box(name, tuple(tensor.shape), cuts)
    held = tuple(tensor.to_local().shape)
    if 0 in held and 0 in box.shape:
        return Box(name, box.offset, held)  # an empty shard may differ in its other dims
    if held != box.shape:
        raise CheckpointError(
            f"{name} holds {held} of {tuple(tensor.shape)} here, but its placements "
            f"{tensor.placements} on {tuple(mesh.shape)} ranks would be {box.shape}."
        )
    return box


def cut_box(name: str, shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """Return the part that remains after cuts by `torch.chunk`, one after the other.

    Args:
        name: Name of the tensor.
        shape: Global shape.
        cuts: For each cut the dim, the number of chunks, and the index of the chunk that is kept.

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
    """Return the shard of a DTensor, else the tensor; detached, with the same memory.

    Args:
        tensor: Any tensor; changes in place are seen through both (they share the version counter).
    """
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
