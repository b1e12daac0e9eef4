"""Compares the copies of weights that ranks hold, a few in turn, while a run goes on.

Note [Equal copies]: replicas, context-parallel ranks and tensor-parallel ranks hold the same bits
of what is not divided among them, as each gets the same sum of gradients and takes the same step. A
memory fault of a device, or code that writes to a weight on one rank alone, ends that in silence:
each rank goes on with its own weights. So every few steps each rank takes a checksum of the next
few tensors, and the ranks compare them. On a GPU the checksums travel while the step computes.

Note [One at a time on gloo]: with torch 2.13, an all-gather in flight on a gloo group beside an
all-gather of the step on the same group corrupted the memory of the process about once in some ten
thousand times; Note [Name of a finished all-gather] of engine/collectives.py has the cause and the
cure. It also hung once, which that does not explain. So ranks on CPUs still wait for the
checksums.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_box, local_part
from lightning_par.errors import VerificationError
from lightning_par.mesh import ParallelMesh

__all__ = ["EqualCopies", "checksum_of", "differing_copies", "error_of_copies", "share_copies"]

_EVERY = 16
"""Optimizer steps from one comparison to the next."""
_ENTRIES = {"cpu": 2**18, "cuda": 2**22}
"""Entries of which a rank takes checksums in one comparison, for each axis."""
_REPLICAS = ("dp_replicate", "dp_shard")
# On CUDA, kernels that add in any order give tensor-parallel ranks other roundings of gradients
# that each computes by itself.
_AXES = {"cpu": (*_REPLICAS, "cp", "tp"), "cuda": (*_REPLICAS, "cp")}
"""Axes along which weights that are not divided have the same bits."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some entries of a tensor, in the order of memory.

    Attributes:
        name: FQN of the parameter.
        tensor: Parameter of this rank.
        start: Number of its first entry.
        count: Number of its entries.
    """

    name: str
    tensor: Tensor
    start: int
    count: int

    def checksum(self) -> Tensor:
        """Return a number of the bits, int64 [], on the device of the tensor."""
        # Of the local part: copies have the same one, in the same order of memory.
        flat = local_part(self.tensor).detach().reshape(-1)[self.start : self.start + self.count]
        return _checksum(flat)


def _checksum(flat: Tensor) -> Tensor:
    """Return a number of the bits of a tensor with one dim, int64 [], on its device."""
    bits = flat.view(_BITS[flat.element_size()]).long()
    # Weighed by place, so that two entries that change places differ, too; it may overflow. An
    # even weight would lose the highest bit of 64.
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def checksum_of(tensor: Tensor) -> int:
    """Return a number of the bits of a plain tensor, the same in every process.

    Args:
        tensor: Any tensor; it is read some entries at a time, which bounds the memory that it
            takes.
    """
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    sums = [_checksum(part) for part in plain.reshape(-1).split(_ENTRIES["cuda"])]
    return hash(tuple(torch.stack(sums).tolist()))


class EqualCopies:
    """Compares copies of parameters; see Note [Equal copies].

    Args:
        module: Its parameters on this rank, the same on all ranks that hold the same stage.
        mesh: Mesh of this run.
        device: Device of this rank.

    Attributes:
        next: Global step at whose beginning `advance` has something to do.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, device: torch.device) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._turns: dict[str, Iterator[list[_Piece]]] | None = None
        self._round: Iterator[None] | None = None
        self._overlaps = device.type != "cpu"  # see Note [One at a time on gloo]
        self.next = 0

    # One comparison takes three steps: checksums are sent, compared, and the verdict is raised;
    # in between a GPU does not wait for the network.
    def advance(self, step: int) -> None:
        """Begin a comparison, or go on with it.

        Args:
            step: The global step, the same on every rank.

        Raises:
            VerificationError: On every rank, if copies differ.

        **Communicates**: a few numbers over each axis along which there are copies, then one over
        all ranks; the first time a number for each parameter.
        """
        if self._turns is None:
            self._turns = self._find_turns()
        if self._round is None:
            self._round = self._compare()
        # `self` is what `next` gives at the end, which no value of the generator is.
        if next(self._round, self) is self:
            self._round = None
            self.next = step + _EVERY
        else:
            self.next = step + 1

    def _find_turns(self) -> dict[str, Iterator[list[_Piece]]]:
        """Return, for each axis along which there are copies, the pieces of each comparison."""
        named, kind = dict(self._module.named_parameters()), self._device.type
        copies = _find_copies(named, self._mesh, _AXES[kind])
        return {axis: _in_turn(chosen, _ENTRIES[kind]) for axis, chosen in copies.items()}

    def _compare(self) -> Iterator[None]:
        """Send checksums; in the next step compare them, and in the one after that raise."""
        sent = []
        for axis, turn in (self._turns or {}).items():
            pieces, group = next(turn), self._mesh.group(axis)
            own = torch.stack([piece.checksum().to(self._device) for piece in pieces])
            every = [torch.empty_like(own) for _ in range(group.size())]
            # All ranks of the axis have the same pieces in the same turn, as `_find_copies`
            # agreed.
            work = dist.all_gather(every, own, group, async_op=self._overlaps)
            sent.append((axis, pieces, every, work))
        yield
        told: list[str] = []
        for axis, pieces, every, work in sent:
            if work is not None:
                work.wait()
            told += _differences(axis, self._mesh, pieces, torch.stack(every).tolist())
        # On every rank, also those that saw no difference: all of them raise together.
        flag = torch.tensor(len(told), device=self._device)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=self._overlaps)
        yield
        if work is not None:
            work.wait()
        if int(flag):
            raise error_of_copies(_join(told))


def error_of_copies(told: str) -> VerificationError:
    """Return the error of a run whose copies of weights differ.

    Args:
        told: Which differ, on which ranks and hosts.
    """
    return VerificationError(
        "LP805",
        f"the copies of a weight on different ranks are not equal any more: {told}. If code "
        "writes to weights on some ranks only, such as a callback inside of `if "
        "trainer.is_global_zero`, change it to write on every rank. If there is no such code, the "
        "memory of a device is faulty: resume from the last checkpoint without that device. The "
        "difference arose after the previous comparison. verify=False turns these comparisons off.",
    )


def differing_copies(
    module: nn.Module, mesh: ParallelMesh, device: torch.device, *, buffers: bool = True
) -> str:
    """Compare all copies of parameters at once, and of buffers between replicas.

    Args:
        module: See `EqualCopies`.
        mesh: Mesh of this run.
        device: Device of this rank.
        buffers: Whether buffers are compared, too.

    Returns:
        Which differ, on which ranks and hosts, the same text on every rank; empty: none does.

    **Communicates**: a number for each tensor over each axis along which there are copies, and the
    text over all ranks.
    """
    told: list[str] = []
    parameters = module.named_parameters(), _AXES[device.type]
    others = module.named_buffers() if buffers else ()
    # Buffers are alike on replicas only: context ranks may hold positions of their own.
    for named, axes in (parameters, (others, _REPLICAS)):
        for axis, copies in _find_copies(dict(named), mesh, axes).items():
            pieces = [
                _Piece(name=name, tensor=tensor, start=0, count=local_part(tensor).numel())
                for name, tensor in copies.items()
            ]
            own = [int(piece.checksum()) for piece in pieces]
            every = [own] * mesh.group(axis).size()
            dist.all_gather_object(every, own, group=mesh.group(axis))
            told += _differences(axis, mesh, pieces, every)
    return _join(dict.fromkeys(told))


@torch.no_grad()
def share_copies(module: nn.Module, mesh: ParallelMesh, device: torch.device) -> None:
    """Give all copies of parameters the values that the first rank of each axis holds.

    Args:
        module: See `EqualCopies`.
        mesh: Mesh of this run.
        device: Device of this rank.

    **Communicates**: a number for each parameter, then the parameters, over each axis.
    """
    named = dict(module.named_parameters())
    for axis, copies in _find_copies(named, mesh, _AXES[device.type]).items():
        for tensor in copies.values():
            dist.broadcast(local_part(tensor), group=mesh.group(axis), group_src=0)


def _find_copies(
    named: Mapping[str, Tensor], mesh: ParallelMesh, axes: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """Return, for each axis along which there are copies, name -> tensor of these."""
    held = {n: p for n, p in named.items() if _is_plain(p) and local_part(p).numel()}
    # Name, place in the whole tensor and dtype: equal keys are copies, others are other shards.
    keys = [crc32(f"{local_box(n, p)} {p.dtype}".encode()) for n, p in held.items()]
    copies = {}
    for axis in axes:
        group = mesh.group(axis)
        if group.size() == 1:
            continue
        every: list[list[int]] = [keys] * group.size()
        dist.all_gather_object(every, keys, group=group)
        if len({len(each) for each in every}) > 1:
            continue  # stages with other parameters, which hold no copies
        alike = [len(set(found)) == 1 for found in zip(*every, strict=True)]
        chosen = {n: p for (n, p), same in zip(held.items(), alike, strict=True) if same}
        if chosen:
            copies[axis] = chosen
    return copies


def _differences(
    axis: str, mesh: ParallelMesh, pieces: Sequence[_Piece], every: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Give what differs along an axis, and on which ranks."""
    ranks = dist.get_process_group_ranks(mesh.group(axis))
    for piece, found in zip(pieces, zip(*every, strict=True), strict=True):
        (most, count), *others = Counter(found).most_common()
        if not others:
            continue
        # With a majority, the few that differ are named; else nobody can tell who is wrong.
        if count > len(ranks) // 2:
            other = [r for r, value in zip(ranks, found, strict=True) if value != most]
            where = f"{_said(other)} different values from the other {count} ranks"
        else:
            where = f"{_said(ranks)} {1 + len(others)} different values"
        yield f"the ranks of {axis} hold copies of {piece.name}, but {where}"


def _join(told: Iterable[str]) -> str:
    """Return what any rank has seen to differ, with the hosts; empty: nothing.

    **Communicates**: the texts, over all ranks.
    """
    every: list[tuple[str, list[str]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), list(told)))
    hosts = ", ".join(dict.fromkeys(host for host, found in every if found))
    lines = list(dict.fromkeys(line for _, found in every for line in found))
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return f"{'; '.join(lines[:3])}{more} (host {hosts})" if lines else ""


def _is_plain(parameter: Tensor) -> bool:
    """Whether the local part is made of entries whose bits can be read."""
    local = local_part(parameter)
    is_own = type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, DTensor)
    known = type(local) in (Tensor, nn.Parameter) and local.element_size() in _BITS
    return is_own and known and local.layout is torch.strided and local.device.type != "meta"


def _in_turn(named: Mapping[str, Tensor], most: int) -> Iterator[list[_Piece]]:
    """Give pieces of at most so many entries together, and begin again after the last ones."""
    while True:
        chosen, room = list[_Piece](), most
        for name, parameter in named.items():
            size, start = local_part(parameter).numel(), 0
            while start < size:
                count = min(room, size - start)
                chosen.append(_Piece(name=name, tensor=parameter, start=start, count=count))
                start, room = start + count, room - count
                if not room:
                    yield chosen
                    chosen, room = [], most
        if chosen:
            yield chosen


def _said(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {named} holds" if len(ranks) == 1 else f"ranks {named} hold"
