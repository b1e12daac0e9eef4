"""Bytes on the wire, counted in process, per mesh axis and operation.

Two numbers per operation, where n is the number of ranks of the group:

- *payload*: the size of the whole tensor that the operation is about, as if it were not sharded;
- *sent*: what this rank sends, with the ring algorithm for the operations of all ranks.

==============  ===========================  =====================================
operation       payload                      sent by this rank
==============  ===========================  =====================================
all_reduce      the tensor                   2 (n-1)/n payload
all_gather      the gathered output          (n-1)/n payload
reduce_scatter  the unreduced input          (n-1)/n payload
all_to_all      this rank's input            payload less the part it keeps
broadcast       the tensor                   payload at the source, else 0
scatter         all parts                    (n-1)/n payload at the source, else 0
gather          all parts                    payload/n, 0 at the destination
reduce          the tensor                   payload, 0 at the destination
send            the tensor                   payload
recv            the tensor                   0
to_host         the tensor                   payload
to_device       the tensor                   payload
==============  ===========================  =====================================

The last two are copies of an offloaded optimizer, under the axis ``host``; they are counted, not
timed. Coalesced forms count one call. Barriers are not counted. A backend may use another algorithm
(trees, copies inside a node); the numbers are those of the standard cost model and do not depend on
it.

With a clock, every transfer is timed as well. *Exposed* is the time that the rank stood still: in
the call itself, and while it waited for the result. *Hidden* is the rest of the time from the call
to the end of the wait, in which the rank went on computing. Both include waiting for ranks that
come later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.clock import Clock
from lightning_par.profiling.collective_hooks import Call, CollectiveHook
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["CommVolume", "CommVolumeEntry", "Transfer", "ring_bytes"]


@dataclass(frozen=True, kw_only=True)
class CommVolumeEntry:
    """What one axis carried in one operation.

    Attributes:
        axis: Name of the mesh axis; "world" or the name of the group where it was not given one.
        operation: As in the table of this module.
        calls: How many times this rank took part.
        payload: Bytes of the whole tensors.
        sent: Bytes that this rank sent, rounded to whole bytes.
    """

    axis: str
    operation: str
    calls: int
    payload: int
    sent: int


@dataclass(eq=False, kw_only=True)
class Transfer:
    """One communication of this rank, timed.

    Attributes:
        axis: As in `CommVolumeEntry`.
        operation: As in the table of this module.
        payload: Bytes of the whole tensor.
        sent: Bytes that this rank sent.
        began: Mark of the call.
        issued: Mark of its end.
        waits: Marks of the begin and end of every wait for the result.
    """

    axis: str
    operation: str
    payload: int
    sent: float
    began: Any
    issued: Any
    waits: list[tuple[Any, Any]] = field(default_factory=list)


def _size(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _kept(call: Call, payload: int, ranks: int, rank: int) -> Fraction:
    """Return the bytes of an all-to-all's input that this rank keeps."""
    if isinstance(call.tensors, list | tuple):
        return Fraction(_size(call.tensors[rank]))
    share = (
        Fraction(call.splits[rank], sum(call.splits) or 1) if call.splits else Fraction(1, ranks)
    )
    return payload * share


@cache
def ring_bytes(operation: str, payload: int, ranks: int, is_root: bool) -> Fraction:
    """Return the bytes that a rank sends, for every operation but all-to-all.

    Args:
        operation: As in the table of this module.
        payload: Bytes of the whole tensor.
        ranks: n.
        is_root: Whether the operation starts or ends at this rank.
    """
    whole, others = Fraction(payload), Fraction(ranks - 1, ranks)
    return {
        "all_reduce": 2 * others * whole,
        "all_gather": others * whole,
        "reduce_scatter": others * whole,
        "broadcast": whole * is_root,
        "scatter": others * whole * is_root,
        "gather": whole / ranks * (not is_root),
        "reduce": whole * (not is_root),
        "send": whole,
        "recv": Fraction(0),
    }[operation]


@dataclass
class _Count:
    calls: int = 0
    payload: int = 0
    sent: Fraction = field(default_factory=Fraction)

    def add(self, other: "_Count") -> None:
        self.calls += other.calls
        self.payload += other.payload
        self.sent += other.sent


class CommVolume(CollectiveHook):
    """Counts the communication of this rank while it is entered; entering again goes on counting.

    It hears forward and backward passes, FSDP2, DTensor, functional collectives, point-to-point and
    compiled code, on every thread of the process. Groups of one rank move nothing and are not
    counted.

    Args:
        axes: Axis name -> the group of this rank along it. If two axes have the same group, the
            first counts.
        clock: Times every transfer; without one, they are only counted.

    Attributes:
        listens: Set it to False to pause.
        transfers: What was heard since they were last taken out, in order; empty without a clock.

    Example:
        >>> with CommVolume({"tp": mesh.get_group("tp")}) as ledger:
        ...     model(batch).sum().backward()
        >>> ledger.total(axis="tp", operation="all_gather").sent
    """

    def __init__(
        self,
        axes: Mapping[str, dist.ProcessGroup] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._axes: dict[str, str] = {}
        self._groups = dict(axes or {})
        for axis, group in (axes or {}).items():
            self._axes.setdefault(group.group_name, axis)
        self._counts: dict[tuple[str, str], _Count] = {}
        self._clock = clock
        self._works: dict[int, tuple[dist.Work, Transfer]] = {}
        self._results: dict[int, Transfer] = {}
        self.listens = True
        self.transfers: list[Transfer] = []

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit()

    def group_of(self, axis: str) -> dist.ProcessGroup:
        """Return the group of an axis that was given."""
        return self._groups[axis]

    def entries(self) -> tuple[CommVolumeEntry, ...]:
        """Return what was counted, by axis (given ones first, in their order) and operation."""
        order = list(self._axes.values())
        place = {axis: number for number, axis in enumerate(order)}
        keys = sorted(self._counts, key=lambda k: (place.get(k[0], len(order)), *k))
        return tuple(_entry(axis, op, self._counts[axis, op]) for axis, op in keys)

    def total(self, *, axis: str | None = None, operation: str | None = None) -> CommVolumeEntry:
        """Return the sum over what matches; None matches everything and reads "all" in the result.

        Args:
            axis: Name of an axis.
            operation: Name of an operation.
        """
        total = _Count()
        for (at, what), count in self._counts.items():
            if axis in (None, at) and operation in (None, what):
                total.add(count)
        return _entry(axis or "all", operation or "all", total)

    def clear(self) -> None:
        """Forget what was counted and heard."""
        self._counts.clear()
        self._works.clear()
        self._results.clear()
        self.transfers = []

    def __str__(self) -> str:
        head = ("axis", "operation", "calls", "payload [B]", "sent [B]")
        rows = [head, *(_cells(e) for e in (*self.entries(), self.total()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(f"{{:{'<' if i < 2 else '>'}{w}}}" for i, w in enumerate(widths))
        return "\n".join(form.format(*row) for row in rows)

    def _mark(self) -> Any:
        return None if self._clock is None or not self.listens else self._clock.mark()

    def _heard(self, call: Call, result: Any, began: Any) -> None:
        if not self.listens or call.group.size() == 1:
            return
        ranks, rank = call.group.size(), call.group.rank()
        payload = _size(call.tensors) * (ranks if call.is_part else 1)
        if call.operation == "all_to_all":
            sent = payload - _kept(call, payload, ranks, rank)
        else:
            sent = ring_bytes(call.operation, payload, ranks, rank == call.root)
        axis = self.axis_of(call.group)
        count = self._counts.setdefault((axis, call.operation), _Count())
        count.add(_Count(calls=1, payload=payload, sent=sent))
        if self._clock is not None:
            transfer = Transfer(
                axis=axis,
                operation=call.operation,
                payload=payload,
                sent=float(sent),
                began=began,
                issued=self._clock.mark(),
            )
            self.transfers.append(transfer)
            self._expect(result, transfer)

    def _copied(self, operation: str, tensor: Tensor) -> None:
        if self.listens:
            size = _size(tensor)
            count = self._counts.setdefault(("host", operation), _Count())
            count.add(_Count(calls=1, payload=size, sent=Fraction(size)))

    def _expect(self, result: Any, transfer: Transfer) -> None:
        """Keep a transfer until its work is waited for, or the tensor that it gives."""
        if not isinstance(result, dist.Work):
            tensors = (t for t in tree_leaves(result) if isinstance(t, Tensor))
            self._results.update((t.data_ptr(), transfer) for t in tensors)
            return
        if transfer.operation == "send":
            # A send may never be waited for; its tensor must not be kept alive by us.
            for key, (work, other) in list(self._works.items()):
                if other.operation == "send" and work.is_completed():
                    del self._works[key]
        self._works[id(result)] = (result, transfer)

    def _waited(self, what: dist.Work | Tensor, began: Any) -> None:
        if began is None or self._clock is None:
            return
        if isinstance(what, Tensor):
            transfer = self._results.pop(what.data_ptr(), None)
        else:
            _, transfer = self._works.pop(id(what), (None, None))
        if transfer is not None:
            transfer.waits.append((began, self._clock.mark()))

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """Return the name under which a group is counted.

        Args:
            group: Of this rank.
        """
        name = group.group_name
        world = dist.group.WORLD is not None and name == dist.group.WORLD.group_name
        return self._axes.get(name, "world" if world else name)


def _entry(axis: str, operation: str, count: _Count) -> CommVolumeEntry:
    return CommVolumeEntry(
        axis=axis,
        operation=operation,
        calls=count.calls,
        payload=count.payload,
        sent=round(count.sent),
    )


def _cells(e: CommVolumeEntry) -> tuple[str, ...]:
    return (e.axis, e.operation, f"{e.calls:,}", f"{e.payload:,}", f"{e.sent:,}")
