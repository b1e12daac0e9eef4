"""Parameters of an optimizer that are whole on one rank each while it steps.

Note [Owners]: an update that looks across a matrix needs it whole, but only on the rank that
computes the update. Before the step every rank sends its shards of a matrix, of its gradient and
of its states to the rank that owns the matrix. After the step the owner sends every rank its
shards of the results. Compared with gathering everything on every rank, memory, messages and the
work of the updates are divided by the number of ranks. Matrices are dealt out by the work of their
updates.

Where two axes of the mesh shard a matrix, messages travel along one axis after the other.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import (
    Box,
    box_of,
    local_part,
    narrowed,
    replicated,
    shard_of,
    sharding_axes,
    whole,
)
from lightning_par.upstream.dtensor import sharded_like

__all__ = ["Owners", "whole_state"]

_Place = tuple[int, ...]
"""Coordinates of a rank on the axes that shard a matrix."""
_States = dict[Any, Any]
"""States of an optimizer: parameter -> {name: value}."""
_Forms = Callable[[int, _Place], Sequence[tuple[torch.dtype, Any]]]
"""Number of a matrix and place of a rank -> dtype and shape of the tensors in a piece."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What the state of a name is.

    Attributes:
        dtype: That of a tensor, or of the tensor that carries a number; None: another value.
        shape: Global shape of a tensor; () for a number.
        device: Where a tensor is; None: it is a number, or another value.
        is_sharded: Whether every rank keeps its shard, since it has the shape of the parameter.
        value: The type of a number, or a pickle of another value.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str | None = None
    is_sharded: bool = False
    value: Any = None

    @classmethod
    def of(cls, value: Any, parameter: Tensor) -> "_Kind":
        """Return the kind of a state, whole or as a rank keeps it between steps."""
        if isinstance(value, Tensor):
            shape = tuple(value.shape)
            is_sharded = bool(shape) and shape == tuple(parameter.shape)
            device = value.device.type
            return cls(dtype=value.dtype, shape=shape, device=device, is_sharded=is_sharded)
        if type(value) in _NUMBERS:
            return cls(dtype=_NUMBERS[type(value)], value=type(value))
        return cls(value=pickle.dumps(value))

    def to_tensor(self, value: Any) -> Tensor:
        """Return a state that is sent, as a tensor."""
        return value.detach() if self.device else torch.tensor(value, dtype=self.dtype)

    def kept(self, values: Iterator[Tensor], parameter: DTensor) -> Any:
        """Return the state as a rank keeps it between steps, from the next of what has arrived."""
        if self.dtype is None:
            return pickle.loads(self.value)
        value = next(values)
        if self.device is None:
            return self.value(value.item())
        value = value.to(self.device)
        if self.is_sharded:
            return sharded_like(value, parameter)
        # A DTensor, so that a checkpoint knows that it is the same on every rank; a step is none.
        return replicated(value, parameter) if self.shape else value


@dataclass(eq=False, kw_only=True)
class _Matrix:
    """A parameter that one rank owns.

    Attributes:
        tensor: Stands for the whole parameter in the optimizer of its owner.
        parameter: Holds this rank's shard.
        owner: Place of the rank that owns it.
        boxes: Place of a rank -> the part of the parameter that it holds.
        kinds: Name of a state -> what it is; the same on every rank.
    """

    tensor: nn.Parameter
    parameter: DTensor
    owner: _Place
    boxes: dict[_Place, Box]
    kinds: dict[str, _Kind] = field(default_factory=dict)

    def forms(self, place: _Place, *, states: bool = True) -> list[tuple[torch.dtype, Any]]:
        """Return dtype and shape of each tensor that the owner sends a rank after a step."""
        shard = self.boxes[place].shape
        kinds = [kind for kind in self.kinds.values() if kind.dtype] if states else []
        forms: list[tuple[torch.dtype, Any]] = [(self.parameter.dtype, shard)]
        forms += [(k.dtype, shard if k.is_sharded else k.shape) for k in kinds]  # type: ignore[misc]
        return forms


class Owners:
    """Sends matrices to the ranks that own them, and back; see Note [Owners].

    Args:
        parameters: For each parameter of an optimizer the number of its group, what stands for the
            whole of it, and the parameter of this rank. The same on all ranks but for the shards.

    **Communicates**: in every step one all-to-all each way, and a vote, over each axis that shards.
    """

    def __init__(self, parameters: Iterable[tuple[int, nn.Parameter, Tensor]]) -> None:
        self._members = [
            (group, tensor, parameter)
            for group, tensor, parameter in parameters
            if isinstance(parameter, DTensor) and sharding_axes(parameter)
        ]
        self._is_gathered = False
        self._trained: list[bool] | None = None
        self._deal([parameter.requires_grad for *_, parameter in self._members])

    def _deal(self, trained: list[bool]) -> None:
        """Choose owners anew if other parameters have gradients than before."""
        if trained == self._trained:
            return
        self._trained = trained
        kinds: defaultdict[Any, list[tuple[bool, nn.Parameter, DTensor]]] = defaultdict(list)
        for trains, (group, tensor, parameter) in zip(trained, self._members, strict=True):
            axes = sharding_axes(parameter)
            kinds[parameter.device_mesh, axes, group].append((trains, tensor, parameter))
        routes: dict[Any, _Route] = {}
        for (mesh, axes, _), members in kinds.items():
            route = routes.get((mesh, axes)) or _Route(mesh, axes)
            # Every rank gets one of each group that has a gradient: counts that an optimizer keeps
            # in a group may be written only where the group has one.
            if sum(trains for trains, *_ in members) >= len(route.places):
                route.deal(members)
                routes[mesh, axes] = route
        self._routes = list(routes.values())
        self._is_mine = {
            id(matrix.tensor): matrix.owner == route.place
            for route in self._routes
            for matrix in route.matrices
        }

    @property
    def has_any(self) -> bool:
        """Whether any parameter has an owner."""
        return bool(self._is_mine)

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether one rank owns the parameter for which a tensor stands."""
        return id(tensor) in self._is_mine

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether another rank owns the parameter for which a tensor stands."""
        return not self._is_mine.get(id(tensor), True)

    def gather(self, states: _States) -> None:
        """Fill the tensors of this rank's matrices, with gradients; put their states in place.

        Args:
            states: Those of the optimizer; changed in place.
        """
        # Within a step owners stay, as they hold the states.
        if not self._is_gathered:
            self._deal([parameter.grad is not None for *_, parameter in self._members])
        self._is_gathered = True
        for route in self._routes:
            route.gather(states)

    def scatter(self, states: _States, *, keep: bool) -> None:
        """Give every rank its shards of the parameters, and of the states, after the step.

        Args:
            states: Those of the optimizer; changed in place.
            keep: The step goes on: leave the states with the owners.
        """
        self._is_gathered = keep
        for route in self._routes:
            route.scatter(states, keep=keep)


class _Route:
    """The way of the matrices that the same axes of a mesh shard.

    Args:
        mesh: The ranks.
        axes: Axes of `mesh` that shard.
    """

    def __init__(self, mesh: DeviceMesh, axes: Sequence[int]) -> None:
        coordinates = mesh.get_coordinate()
        assert coordinates is not None
        self.place = tuple(coordinates[axis] for axis in axes)
        self.places: list[_Place] = list(product(*(range(mesh.size(axis)) for axis in axes)))
        self.matrices: list[_Matrix] = []
        self._axes, self._sizes = tuple(axes), [mesh.size(axis) for axis in axes]
        self._groups = [mesh.get_group(axis) for axis in axes]
        self._work = dict.fromkeys(self.places, 0)

    def deal(self, members: Sequence[tuple[bool, nn.Parameter, DTensor]]) -> None:
        """Choose the owners of parameters: the next largest goes to the rank with the least work.

        Args:
            members: Whether a parameter has a gradient, as at least as many have as there are
                ranks; what stands for the whole of it; and the parameter.
        """
        idle = set(self.places)
        ranked = sorted(members, key=lambda member: (not member[0], -_work(member[2])))
        for _, tensor, parameter in ranked:
            owner = min(idle or self.places, key=lambda place: (self._work[place], place))
            idle.discard(owner)
            self._work[owner] += _work(parameter)
            boxes = {
                place: box_of(parameter, dict(zip(self._axes, place, strict=True)))
                for place in self.places
            }
            self.matrices.append(
                _Matrix(tensor=tensor, parameter=parameter, owner=owner, boxes=boxes)
            )

    def gather(self, states: _States) -> None:
        """See `Owners.gather`."""
        held, sent = [], []
        for matrix in self.matrices:
            # Moved and not copied: the entry of the parameter comes back after the step.
            own = states.pop(matrix.parameter, None)
            if own is not None:
                matrix.kinds = {k: _Kind.of(v, matrix.parameter) for k, v in own.items()}
            held.append(own)
            sent.append([*_shards(matrix, own)])
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in sent]

        def forms(number: int, place: _Place) -> list[tuple[torch.dtype, Any]]:
            shape = self.matrices[number].boxes[place].shape
            return [(dtype, shape) for dtype in dtypes[number]]

        for number, pieces in self._collect([*map(_pack, sent)], forms).items():
            matrix, own = self.matrices[number], held[number]
            wholes = [tensor.new_empty(matrix.parameter.shape) for tensor in sent[number]]
            for place, piece in pieces.items():
                values = _unpack(piece, forms(number, place))
                for full, value in zip(wholes, values, strict=True):
                    narrowed(full, matrix.boxes[place]).copy_(value)
            rest = iter(wholes)
            matrix.tensor.grad = None
            matrix.tensor.data = next(rest)
            if matrix.parameter.grad is not None:
                matrix.tensor.grad = next(rest)
            if own is not None:
                states[matrix.tensor] = {
                    k: next(rest) if matrix.kinds[k].is_sharded else whole_state(v)
                    for k, v in own.items()
                }

    def scatter(self, states: _States, *, keep: bool) -> None:
        """See `Owners.scatter`."""
        mine = {i: m for i, m in enumerate(self.matrices) if m.owner == self.place}
        # A parameter that no step has moved has no entry, as on one process.
        own = {i: {} if keep else states.pop(m.tensor, {}) for i, m in mine.items()}
        if not keep:
            kinds = {
                i: {k: _Kind.of(v, m.parameter) for k, v in own[i].items()} for i, m in mine.items()
            }
            self._agree({i: k for i, k in kinds.items() if k != self.matrices[i].kinds})
        sent: dict[int, dict[_Place, Tensor]] = {}
        for number, matrix in mine.items():
            pairs = [(matrix.kinds[k], v) for k, v in own[number].items() if matrix.kinds[k].dtype]
            values = [(True, matrix.tensor.detach())]
            values += [(kind.is_sharded, kind.to_tensor(v)) for kind, v in pairs]
            sent[number] = {
                place: _pack([narrowed(v, box) if cut else v for cut, v in values])
                for place, box in matrix.boxes.items()
            }

        def forms(number: int, place: _Place) -> list[tuple[torch.dtype, Any]]:
            return self.matrices[number].forms(place, states=not keep)

        for number, piece in enumerate(self._distribute(sent, forms)):
            matrix, parts = self.matrices[number], iter(_unpack(piece, forms(number, self.place)))
            # Into the memory of the parameter: FSDP and others hold it.
            local_part(matrix.parameter).copy_(next(parts))
            if not keep and matrix.kinds:
                states[matrix.parameter] = {
                    k: kind.kept(parts, matrix.parameter) for k, kind in matrix.kinds.items()
                }

    def _agree(self, changed: Mapping[int, dict[str, _Kind]]) -> None:
        """Tell all ranks what the states of this rank's matrices have become."""
        device = self.matrices[0].parameter.to_local().device
        vote = torch.tensor(bool(changed), device=device, dtype=torch.int)
        for group in self._groups:
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=group)
        if not vote:
            return
        told = dict(changed)
        for group in self._groups:
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, told, group=group)
            told = {number: kinds for each in found for number, kinds in each.items()}
        for number, kinds in told.items():
            self.matrices[number].kinds = kinds

    def _collect(self, parts: Sequence[Tensor], forms: _Forms) -> dict[int, dict[_Place, Tensor]]:
        """Send parts to the owners of their matrices.

        Args:
            parts: This rank's part of every matrix, as bytes.
            forms: Gives what a matrix's part of a rank consists of.

        Returns:
            Number of each matrix of this rank -> place of a rank -> its part, as bytes.
        """
        held = {i: {self.place: part} for i, part in enumerate(parts)}
        for axis, (size, group) in enumerate(zip(self._sizes, self._groups, strict=True)):
            owner = {i: self.matrices[i].owner[axis] for i in held}
            out = [
                [p for i in held if owner[i] == to for p in held[i].values()] for to in range(size)
            ]
            mine = [i for i in held if owner[i] == self.place[axis]]
            arriving = [
                [(i, (*p[:axis], source, *p[axis + 1 :])) for i in mine for p in held[i]]
                for source in range(size)
            ]
            held = self._exchange(out, arriving, forms, group)
        return held

    def _distribute(
        self, parts: Mapping[int, Mapping[_Place, Tensor]], forms: _Forms
    ) -> list[Tensor]:
        """Send parts from the owners of their matrices to the ranks; the reverse of `_collect`.

        Args:
            parts: Number of each matrix of this rank -> place of a rank -> its part, as bytes.
            forms: Gives what a matrix's part of a rank consists of.

        Returns:
            This rank's part of every matrix.
        """
        held: Mapping[int, Mapping[_Place, Tensor]] = parts
        for axis in reversed(range(len(self._sizes))):
            size, group = self._sizes[axis], self._groups[axis]
            out = [
                [held[i][p] for i in held for p in held[i] if p[axis] == to] for to in range(size)
            ]
            # Up to this axis each matrix is still with the ranks of its owner's coordinates.
            near = [i for i, m in enumerate(self.matrices) if m.owner[:axis] == self.place[:axis]]
            ours = [p for p in self.places if p[axis:] == self.place[axis:]]
            arriving = [
                [(i, p) for i in near if self.matrices[i].owner[axis] == source for p in ours]
                for source in range(size)
            ]
            held = self._exchange(out, arriving, forms, group)
        return [held[i][self.place] for i in range(len(self.matrices))]

    def _exchange(
        self,
        out: Sequence[Sequence[Tensor]],
        arriving: Sequence[Sequence[tuple[int, _Place]]],
        forms: _Forms,
        group: dist.ProcessGroup,
    ) -> dict[int, dict[_Place, Tensor]]:
        """Send pieces of bytes to each rank of a group, and sort what arrives.

        Args:
            out: The pieces for each rank.
            arriving: What comes from each rank: matrix and place of each piece, in order.
            forms: Gives what a piece consists of.
            group: The ranks.
        """
        counts = [[_count(forms(i, place)) for i, place in of] for of in arriving]
        flat = torch.cat([piece for of in out for piece in of] or [self._nothing()])
        found = flat.new_empty(sum(map(sum, counts)))
        lengths = [sum(piece.numel() for piece in of) for of in out]
        dist.all_to_all_single(found, flat, [*map(sum, counts)], lengths, group=group)
        pieces = iter(found.split([count for of in counts for count in of]))
        held: defaultdict[int, dict[_Place, Tensor]] = defaultdict(dict)
        for number, place in (key for of in arriving for key in of):
            held[number][place] = next(pieces)
        return {number: dict(sorted(held[number].items())) for number in sorted(held)}

    def _nothing(self) -> Tensor:
        device = self.matrices[0].parameter.to_local().device
        return torch.empty(0, dtype=torch.uint8, device=device)


def _shards(matrix: _Matrix, states: Mapping[str, Any] | None) -> Iterator[Tensor]:
    """Yield this rank's shards of what is cut as a matrix is: its values, gradient and states."""
    parameter = matrix.parameter
    values: list[Any] = [parameter] if parameter.grad is None else [parameter, parameter.grad]
    values += [v for k, v in (states or {}).items() if matrix.kinds[k].is_sharded]
    for value in values:
        if not isinstance(value, DTensor):
            value = shard_of(value, parameter)
        yield local_part(value.redistribute(placements=parameter.placements))


def _work(parameter: Tensor) -> int:
    """Return about how many operations an update takes: products of matrices, for a matrix."""
    sides = parameter.shape if parameter.ndim > 1 else (1,)
    return parameter.numel() * min(sides)


def whole_state(value: Any) -> Any:
    """Return a state of an optimizer as a step on whole tensors has it."""
    return whole(value).detach() if isinstance(value, Tensor) else value


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, on the device of the first."""
    device = tensors[0].device
    flat = [t.detach().to(device).contiguous().flatten().view(torch.uint8) for t in tensors]
    return torch.cat(flat)


def _unpack(piece: Tensor, forms: Sequence[tuple[torch.dtype, Any]]) -> list[Tensor]:
    """Return the tensors whose bytes a piece holds."""
    parts = piece.split([_count([form]) for form in forms])
    # Copied, as bytes at any place are no other numbers.
    pairs = zip(parts, forms, strict=True)
    return [part.clone().view(dtype).view(shape) for part, (dtype, shape) in pairs]


def _count(forms: Sequence[tuple[torch.dtype, Any]]) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in forms)
