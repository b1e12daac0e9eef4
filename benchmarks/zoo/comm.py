"""The ranks of the zoo: axes, groups, and the collectives with their gradients.

Every fault of communication swaps one of the methods of `Comm`; nothing else communicates.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AXES", "Comm", "Layout"]

AXES = ("idle", "pp", "dp", "ep", "cp", "tp")
"""Axes of the mesh, outermost first. Ranks along "idle" compute the same and never meet."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is divided.

    Attributes:
        pp: Stages of the pipeline.
        dp: Replicas, which have samples of their own.
        ep: Ranks that share the experts; they have samples of their own, too.
        cp: Ranks that share the tokens of a sequence.
        tp: Ranks that share every matrix.
        idle: Copies of all of it that do not communicate.
        micro: Micro-batches of a step.
        zero: Whether replicas share gradients and optimizer states (ZeRO 2).
        sequence: Whether tensor-parallel ranks share tokens between the matrices.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    idle: int = 1
    micro: int = 1
    zero: bool = False
    sequence: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.idle * self.pp * self.dp * self.ep * self.cp * self.tp

    @property
    def axes(self) -> tuple[str, ...]:
        """What is on, as options that `without` takes."""
        sizes = [axis for axis in AXES[1:] if getattr(self, axis) > 1]
        sizes += ["zero"] * (self.zero and self.dp > 1)
        sizes += ["sequence"] * (self.sequence and self.tp > 1)
        return (*sizes, *(["micro"] * (self.micro > 1)))

    def without(self, axis: str) -> "Layout":
        """Return the layout with an axis switched off, for as many ranks."""
        if axis in ("zero", "sequence"):
            return replace(self, **{axis: False})
        if axis == "micro":
            return replace(self, micro=1)
        return replace(self, **{axis: 1, "idle": self.idle * getattr(self, axis)})

    def __str__(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in AXES[1:] if getattr(self, axis) > 1]
        words = [word for word in ("zero", "sequence") if getattr(self, word)]
        return " ".join([*sizes, *words, *([f"micro {self.micro}"] * (self.micro > 1))]) or "one"


class _Pair(torch.autograd.Function):
    """A collective in the forward, and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.collective(grad.contiguous()), None, None


@dataclass(kw_only=True)
class Comm:
    """The place of a rank in a layout, and what it sends.

    Attributes:
        layout: Of all ranks.
        place: Axis -> number of this rank along it.
        groups: Axes, in the order of `AXES` -> ranks that differ in these axes only.
        ranks: The same, as numbers.
    """

    layout: Layout = field(default_factory=Layout)
    place: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))
    groups: dict[tuple[str, ...], Any] = field(default_factory=dict)
    ranks: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout) -> "Comm":
        """Make the groups of a layout; every rank calls it.

        **Communicates**: groups are made on all ranks in one order.
        """
        sizes = [getattr(layout, axis) for axis in AXES]
        places = [dict(zip(AXES, p, strict=True)) for p in itertools.product(*map(range, sizes))]
        own = places[dist.get_rank()] if layout.world > 1 else places[0]
        made = cls(layout=layout, place=own)
        sets = [*((axis,) for axis in AXES[1:]), ("dp", "ep"), ("dp", "ep", "cp"), AXES[1:]]
        for axes in sets if layout.world > 1 else ():
            if made.size(*axes) == 1:
                continue
            fixed = [axis for axis in AXES if axis not in axes]
            for at in itertools.product(*(range(getattr(layout, axis)) for axis in fixed)):
                chosen = dict(zip(fixed, at, strict=True))
                ranks = [n for n, p in enumerate(places) if chosen.items() <= p.items()]
                group = dist.new_group(ranks)
                if chosen.items() <= own.items():
                    made.groups[axes], made.ranks[axes] = group, ranks
        return made

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups.values():
            dist.destroy_process_group(group)

    def size(self, *axes: str) -> int:
        """Return the number of ranks along axes."""
        found = 1
        for axis in axes:
            found *= getattr(self.layout, axis)
        return found

    # Without gradients

    def sum(self, x: Tensor, *axes: str) -> Tensor:
        """Return the sum over the ranks along axes."""
        return self._reduce(x, axes, dist.ReduceOp.SUM)

    def max(self, x: Tensor, *axes: str) -> Tensor:
        """Return the largest of the ranks along axes."""
        return self._reduce(x, axes, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, axes: Sequence[str], op: Any) -> Tensor:
        if self.size(*axes) == 1:
            return x
        x = x.clone()
        dist.all_reduce(x, op, group=self.groups[tuple(axes)])
        return x

    def gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Return the parts of all ranks along an axis, one after the other."""
        if self.size(axis) == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size(axis))]
        dist.all_gather(parts, x.contiguous(), group=self.groups[(axis,)])
        return torch.cat(parts, dim)

    def scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Return this rank's part of the sum over the ranks along an axis."""
        return self.part(self.sum(x, axis), axis, dim)

    def part(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Return this rank's part of what every rank has."""
        return x.chunk(self.size(axis), dim)[self.place[axis]].contiguous()

    def swap(self, x: Tensor, axis: str) -> Tensor:
        """Send the n-th part of the first dim to the n-th rank along an axis (all-to-all)."""
        if self.size(axis) == 1:
            return x
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=self.groups[(axis,)])
        return out

    def send(self, x: Tensor, stages: int) -> None:
        """Send to the stage so many further on."""
        dist.send(x.detach().contiguous(), self.ranks[("pp",)][self.place["pp"] + stages])

    def receive(self, like: Tensor, stages: int) -> Tensor:
        """Return what the stage so many further on sends."""
        out = torch.empty_like(like)
        dist.recv(out, self.ranks[("pp",)][self.place["pp"] + stages])
        return out

    # With gradients; the tokens are dim 1 of activations.

    def enter(self, x: Tensor) -> Tensor:
        """Give activations to matrices that are divided by their outputs."""
        if self.layout.sequence:
            return self._pair(
                x, lambda x: self.gather(x, "tp", 1), lambda g: self.scatter(g, "tp", 1)
            )
        return self._pair(x, lambda x: x.clone(), lambda g: self.sum(g, "tp"))

    def leave(self, x: Tensor) -> Tensor:
        """Add up the results of matrices that are divided by their inputs."""
        if self.layout.sequence:
            return self._pair(
                x, lambda x: self.scatter(x, "tp", 1), lambda g: self.gather(g, "tp", 1)
            )
        return self.add_up(x, "tp")

    def add_up(self, x: Tensor, *axes: str) -> Tensor:
        """Sum over ranks; every rank then computes the same from it, and one gradient counts."""
        return self._pair(x, lambda x: self.sum(x, *axes), lambda g: g)

    def collect(self, x: Tensor, axis: str) -> Tensor:
        """Give every rank the tokens of all ranks along an axis."""
        return self._pair(x, lambda x: self.gather(x, axis, 1), lambda g: self.scatter(g, axis, 1))

    def exchange(self, x: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, or back."""
        return self._pair(x, lambda x: self.swap(x, "ep"), lambda g: self.swap(g, "ep"))

    def _pair(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        found: Tensor = _Pair.apply(x, forward, backward)
        return found
