"""Which part of a DTensor this rank holds, and the whole of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_par.errors import CheckpointError, PlanError
from lightning_par.upstream.distributed import functional_operators as _ops
from lightning_par.upstream.dtensor import sharded_like
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.tensor import own_attributes

__all__ = [
    "Box",
    "box_at",
    "box_of",
    "buckets",
    "cut_box",
    "full_tensors",
    "like_parameter",
    "local_box",
    "local_part",
    "narrowed",
    "replicated",
    "shard_of",
    "sharding_axes",
    "whole",
    "whole_values",
]

_VALUES = ("__bool__", "__float__", "__int__", "item", "tolist")

_BUCKET = 2**22
"""Bytes: small tensors travel together, as a message of one takes as long as one of many."""


def like_parameter(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter with other data and the attributes that users have set."""
    made = nn.Parameter(data, parameter.requires_grad)
    vars(made).update(own_attributes(parameter))
    return made


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
    # Placements alone tell the part; the shape that is held is compared with it.
    box = box_at(name, tensor.shape, mesh, tensor.placements)
    held = tuple(tensor.to_local().shape)
    if 0 in held and 0 in box.shape:
        return Box(name, box.offset, held)  # an empty shard may differ in its other dims
    if held != box.shape:
        raise CheckpointError(
            "LP505",
            f"the tensor {name} has the shape {tuple(tensor.shape)}. Its shard on this rank has "
            f"the shape {held}, but the placements {tensor.placements} on {tuple(mesh.shape)} "
            f"ranks give the shape {box.shape}. Shard it as torch.chunk does.",
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
    # None where a rank would hold several strips: no box names them.
    shards = _block_cuts(placements)
    if shards is None:
        raise CheckpointError(
            "LP505",
            f"the tensor {name} is sharded as {tuple(placements)}: a rank holds several separate "
            "parts of one dim instead of one block, which a checkpoint cannot store. Do not shard "
            "the weight, or give the weight a separate dim for these parts.",
        )
    return cut_box(name, shape, [(dim, mesh.size(i), place[i]) for i, dim in shards])


def _block_cuts(placements: Sequence[Placement]) -> list[tuple[int, int]] | None:
    """Return the axis of the mesh and the dim of every cut, in the order in which they were made;
    None if a rank would hold several strips of a dim.
    """
    # Only shards have a dim, strided ones included; Replicate has none.
    shards: list[tuple[int, Any]] = [(i, p) for i, p in enumerate(placements) if hasattr(p, "dim")]
    shards.sort(key=lambda shard: type(shard[1]) is not Shard)  # strided ones were made last
    plain = {p.dim for _, p in shards if type(p) is Shard}
    if any(p.dim not in plain for _, p in shards):  # nothing was cut before: these are strips
        return None
    return [(i, p.dim) for i, p in shards]


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
        # As torch.chunk cuts: ceil, so that the last chunks are smaller or empty.
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


@contextmanager
def whole_values() -> Iterator[None]:
    """Inside, a DTensor becomes a number or a list of Python as a whole.

    Torch gives the part of this rank, as if it were the whole, or refuses. Every rank that holds a
    part has to ask, as for `whole`.
    """

    def convert(name: str) -> Callable[..., Any]:
        return lambda tensor, *args, **options: getattr(Tensor, name)(
            whole(tensor.detach()), *args, **options
        )

    with ExitStack() as stack:
        for name in _VALUES:
            stack.enter_context(replaced(DTensor, name, convert(name)))
        stack.enter_context(replaced(DTensor, "numpy", _refuse_array))
        yield


def _refuse_array(tensor: Tensor, **_: Any) -> Any:
    """Refuse: arrays are mostly made to be written, which one rank does alone."""
    raise PlanError(
        "LP417",
        f"numpy() is called on a weight or gradient of shape {tuple(tensor.shape)} that is "
        "sharded: this rank holds only a part of it. Call trainer.strategy.full_parameter(name), "
        "or full_tensor() of the weight or gradient, on every rank, and write the result on rank "
        "0.",
    )


def _full_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def full_tensors(tensors: Iterable[Tensor], *, bucket: int = _BUCKET) -> Iterator[Tensor]:
    """Yield the `whole` of every tensor, without gradient; small ones are gathered together.

    Args:
        tensors: Like tensors in the same order on all ranks of their meshes.
        bucket: Bytes of whole tensors up to which they are gathered together.

    **Communicates**: for every bucket, one all-gather over each axis that shards its tensors, for
    every mesh, dtype, and set of such axes; larger tensors, partial ones and strips as `whole`.
    """
    # What is no DTensor may differ between ranks, and must not decide what goes together.
    sizes = lambda t: _full_bytes(t) if isinstance(t, DTensor) else 0  # noqa: E731
    for members in buckets(tensors, bucket, sizes):
        kinds: defaultdict[Any, dict[int, DTensor]] = defaultdict(dict)
        for at, tensor in enumerate(members):
            # Large and partial ones go alone, by `whole`.
            if isinstance(tensor, DTensor) and (axes := _gathered_axes(tensor, bucket)):
                kinds[tensor.device_mesh, axes, tensor.dtype, tensor.device][at] = tensor
        found: dict[int, Tensor] = {}
        for (mesh, axes, *_), alike in kinds.items():
            found.update(zip(alike, _gather_blocks(mesh, axes, [*alike.values()]), strict=True))
        for at, tensor in enumerate(members):
            yield found[at] if at in found else whole(tensor.detach())


def buckets(
    tensors: Iterable[Tensor],
    most: int = _BUCKET,
    size: Callable[[Tensor], int] = _full_bytes,
) -> Iterator[list[Tensor]]:
    """Yield tensors in lists that end where they have so many bytes.

    Args:
        tensors: Any tensors.
        most: Bytes.
        size: Bytes that a tensor counts; by default all that it has on all ranks.
    """
    members, held = [], 0
    for tensor in tensors:
        members.append(tensor)
        held += size(tensor)
        if held >= most:
            yield members
            members, held = [], 0
    if members:
        yield members


def _gathered_axes(tensor: DTensor, bucket: int) -> tuple[int, ...]:
    """Return the axes over which a small DTensor of blocks is sharded, else nothing."""
    return () if _full_bytes(tensor) >= bucket else sharding_axes(tensor)


def sharding_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the axes of its mesh over which a DTensor is cut into blocks.

    Empty if nothing cuts it, if ranks hold strips of it, or parts of a sum.
    """
    if any(p.is_partial() for p in tensor.placements):
        return ()
    return tuple(sorted(axis for axis, _ in _block_cuts(tensor.placements) or ()))


def _gather_blocks(
    mesh: DeviceMesh, axes: Sequence[int], tensors: Sequence[DTensor]
) -> list[Tensor]:
    """Return tensors of one dtype, which the same axes shard into blocks, whole."""
    sizes = [mesh.size(axis) for axis in axes]
    boxes = []
    for indices in product(*map(range, sizes)):
        place = dict(zip(axes, indices, strict=True))
        boxes.append([box_of(t, place) for t in tensors])
    # Boxes of ranks may differ in size: rows are padded to the longest.
    length = max(sum(prod(box.shape) for box in held) for held in boxes)
    parts = [local_part(tensor).flatten() for tensor in tensors]
    flat = torch.cat([*parts, parts[0].new_zeros(length - sum(map(len, parts)))])
    # The innermost axis first: rows then follow each other as `product` gives the boxes.
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        group = mesh.get_group(axis).group_name
        flat = _ops.wait_tensor(_ops.all_gather_into_tensor(flat, size, group))
    found = [flat.new_empty(tensor.shape) for tensor in tensors]
    for held, row in zip(boxes, flat.view(-1, length), strict=True):
        counts = [prod(box.shape) for box in held]
        rows = row[: sum(counts)].split(counts)
        for full, box, values in zip(found, held, rows, strict=True):
            narrowed(full, box).copy_(values.view(box.shape))
    return found


def box_of(tensor: DTensor, place: Mapping[int, int]) -> Box:
    """Return which part of a DTensor a rank holds.

    Args:
        tensor: Cut into blocks, see `sharding_axes`.
        place: Axis of its mesh that cuts it -> the rank's coordinate there.
    """
    cuts = _block_cuts(tensor.placements) or ()
    sizes = tensor.device_mesh.size
    return cut_box("tensor", tensor.shape, [(dim, sizes(i), place[i]) for i, dim in cuts])


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Return the part of a whole tensor that a box names, with the same memory.

    Args:
        tensor: The whole tensor.
        box: Names the part.
    """
    for dim, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, low, size)
    return tensor


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor as `like` is sharded.

    Args:
        tensor: The whole value, of the shape of `like`, the same on every rank.
        like: A plain tensor, then `tensor` is returned; or a DTensor.
    """
    if not isinstance(like, DTensor):
        return tensor
    # Cloned: a view would keep the whole value alive.
    return sharded_like(narrowed(tensor, local_box("tensor", like)).clone(), like)


def replicated(tensor: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of which each rank that holds a part of `like` holds the whole.

    Args:
        tensor: The same on these ranks; moved to the device of the mesh.
        like: Its mesh is taken.
    """
    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
