"""Communication volume of this rank: bytes per mesh axis and operation, counted as they are called.

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

With a clock, every transfer is timed as well. *Exposed* is the time in which the rank was blocked:
in the call itself, and in the wait for the result. *Hidden* is the rest of the time from the call
to the end of the wait, overlapped with computation. Both include waiting for slower ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.clock import Clock
from lightning_par.engine.pipeline.stage_links import ODD
from lightning_par.observe.collective_hooks import Call, CollectiveHook
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["CommVolume", "CommVolumeEntry", "Transfer", "payload_of", "ring_bytes"]


@dataclass(frozen=True, kw_only=True)
class CommVolumeEntry:
    """Communication volume of this rank on one axis in one operation.

    Attributes:
        axis: Mesh axis of the group; "world" or the group's own name if no axis was given for it.
        operation: As in the table of this module.
        calls: Number of calls in which this rank took part.
        payload: Bytes of the unsharded tensors, summed over the calls.
        sent: Bytes that this rank sent, rounded to whole bytes.
    """

    axis: str
    operation: str
    calls: int
    payload: int
    sent: int


@dataclass(eq=False, kw_only=True)
class Transfer:
    """One collective, send or receive of this rank, with time marks (see `Clock.mark`).

    Attributes:
        axis: As in `CommVolumeEntry`.
        operation: As in the table of this module.
        payload: Bytes of the unsharded tensor.
        sent: Bytes that this rank sent.
        began: Mark before the call.
        issued: Mark after the call returned.
        waits: Marks before and after each wait for the result.
    """

    axis: str
    operation: str
    payload: int
    sent: float
    began: Any
    issued: Any
    waits: list[tuple[Any, Any]] = field(default_factory=list)


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def payload_of(call: Call) -> int:
    """Return the bytes of the unsharded tensors that a call is about."""
    return _nbytes(call.tensors) * (call.group.size() if call.is_part else 1)


def _own_part(call: Call, payload: int, ranks: int, rank: int) -> Fraction:
    """Return the bytes of an all-to-all's input that this rank sends to itself."""
    # One tensor per rank: its own is the part that it keeps.
    if isinstance(call.tensors, list | tuple):
        return Fraction(_nbytes(call.tensors[rank]))
    fraction = (
        Fraction(call.splits[rank], sum(call.splits) or 1) if call.splits else Fraction(1, ranks)
    )
    return payload * fraction


@cache
def ring_bytes(operation: str, payload: int, ranks: int, is_root: bool) -> Fraction:
    """Return the bytes that a rank sends under the ring algorithm; all-to-all: of equal parts.

    Args:
        operation: As in the table of this module.
        payload: Bytes of the unsharded tensor.
        ranks: n, the size of the group.
        is_root: Whether this rank is the source (broadcast, scatter) or destination (gather,
            reduce).
    """
    # Fractions and not floats: sums over a run stay exact, and tests can compare with ==.
    whole, others = Fraction(payload), Fraction(ranks - 1, ranks)
    return {
        "all_reduce": 2 * others * whole,
        "all_gather": others * whole,
        "reduce_scatter": others * whole,
        "all_to_all": others * whole,
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
    """Counter of this rank's communication; a context manager that may be entered again to go on.

    Counts forward and backward passes, FSDP2, DTensor, functional collectives, point-to-point and
    compiled code, on every thread of the process. Groups of one rank move nothing and are not
    counted.

    Args:
        axes: Axis name -> process group of this rank along it. If two axes have the same group, it
            is counted under the first.
        clock: Clock that times every transfer; None: transfers are counted, not timed.

    Attributes:
        enabled: Whether calls are counted; set it to False to pause.
        transfers: Timed transfers since the last `clear`, in the order of the calls; empty without
            a clock.

    Examples:
        >>> with CommVolume({"tp": mesh.get_group("tp")}) as volume:
        ...     model(batch).sum().backward()
        >>> volume.total(axis="tp", operation="all_gather").sent
    """

    def __init__(
        self,
        axes: Mapping[str, dist.ProcessGroup] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._axes: dict[str, str] = {}
        self._groups = dict(axes or {})
        # Neighbors in a pipeline alternate between two groups, which count as one.
        for axis, group in (axes or {}).items():
            # The first of axes with one group counts.
            self._axes.setdefault(group.group_name, axis.removesuffix(ODD))
        self._counts: dict[tuple[str, str], _Count] = {}
        self._clock = clock
        # Not yet waited for, by id() of the Work, which is kept so that no other gets its id, or by
        # data_ptr() of the output of a functional collective, which is waited for as a tensor.
        self._pending_works: dict[int, tuple[dist.Work, Transfer]] = {}
        self._pending_outputs: dict[int, Transfer] = {}
        self.enabled = True
        self.transfers: list[Transfer] = []

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit()

    def group_of(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of one of the given axes.

        Args:
            axis: A key of `axes`.
        """
        return self._groups[axis]

    def entries(self) -> tuple[CommVolumeEntry, ...]:
        """Return one entry per axis and operation: the given axes first, in their order."""
        order = list(self._axes.values())
        place = {axis: number for number, axis in enumerate(order)}
        # Axes that were not given come last, by name.
        keys = sorted(self._counts, key=lambda k: (place.get(k[0], len(order)), *k))
        return tuple(_entry(axis, op, self._counts[axis, op]) for axis, op in keys)

    def total(self, *, axis: str | None = None, operation: str | None = None) -> CommVolumeEntry:
        """Return the sum over the entries of an axis and an operation.

        Args:
            axis: Name of an axis; None: all axes, named "all" in the result.
            operation: Name of an operation; None: all, likewise.
        """
        total = _Count()
        for (at, what), count in self._counts.items():
            if axis in (None, at) and operation in (None, what):
                total.add(count)
        return _entry(axis or "all", operation or "all", total)

    def clear(self) -> None:
        """Reset the counts and drop the transfers."""
        self._counts.clear()
        self._pending_works.clear()
        self._pending_outputs.clear()
        self.transfers = []  # a new list: whoever read the old one keeps it

    def __str__(self) -> str:
        head = ("axis", "operation", "calls", "payload [B]", "sent [B]")
        rows = [head, *(_cells(e) for e in (*self.entries(), self.total()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(f"{{:{'<' if i < 2 else '>'}{w}}}" for i, w in enumerate(widths))
        return "\n".join(form.format(*row) for row in rows)

    def _mark(self) -> Any:
        return None if self._clock is None or not self.enabled else self._clock.mark()

    def _on_call(self, call: Call, result: Any, began: Any) -> None:
        if not self.enabled or call.group.size() == 1:
            return
        ranks, rank = call.group.size(), call.group.rank()
        payload = payload_of(call)
        if call.operation == "all_to_all":
            # The splits may differ by rank, so that no formula of n alone holds.
            sent = payload - _own_part(call, payload, ranks, rank)
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
            self._track(result, transfer)

    def _on_copy(self, operation: str, tensor: Tensor) -> None:
        if self.enabled:
            size = _nbytes(tensor)
            count = self._counts.setdefault(("host", operation), _Count())
            count.add(_Count(calls=1, payload=size, sent=Fraction(size)))

    def _track(self, result: Any, transfer: Transfer) -> None:
        """Remember a transfer until its result is waited for."""
        if not isinstance(result, dist.Work):
            # By memory: `wait_tensor` returns the same storage, as another tensor.
            tensors = (t for t in tree_leaves(result) if isinstance(t, Tensor))
            self._pending_outputs.update((t.data_ptr(), transfer) for t in tensors)
            return
        if transfer.operation == "send":
            # A send may never be waited for; its Work would keep the sent tensor alive.
            # A list, since entries are removed.
            for key, (work, other) in list(self._pending_works.items()):
                if other.operation == "send" and work.is_completed():
                    del self._pending_works[key]
        self._pending_works[id(result)] = (result, transfer)

    def _on_wait(self, awaited: dist.Work | Tensor, began: Any) -> None:
        if began is None or self._clock is None:
            return
        if isinstance(awaited, Tensor):
            # Popped: a second wait for the same output takes no time.
            transfer = self._pending_outputs.pop(awaited.data_ptr(), None)
        else:
            _, transfer = self._pending_works.pop(id(awaited), (None, None))
        # Unknown: a call from before this counter was entered, or while it was paused.
        if transfer is not None:
            transfer.waits.append((began, self._clock.mark()))

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """Return the name of the axis under which a group is counted.

        Args:
            group: Any process group that this rank is in.
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
