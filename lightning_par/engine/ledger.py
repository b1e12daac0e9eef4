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
==============  ===========================  =====================================

Coalesced forms count one call. Barriers are not counted. A backend may use another algorithm
(trees, copies inside a node); the numbers are those of the standard cost model and do not depend on
it.

Not seen: other threads than the one that entered the ledger (and the autograd threads that it
starts), and collectives that C++ code issues on the process group without the dispatcher.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Ledger", "LedgerEntry"]


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
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


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Which argument of an operator is counted, and whether it is one of n equal parts."""

    operation: str
    argument: str
    is_part: bool = False


def _rules() -> dict[str, _Rule]:
    """Return operator -> rule."""
    rules: dict[str, _Rule] = {}

    def add(operation: str, argument: str, *names: str, is_part: bool = False) -> None:
        rule = _Rule(operation=operation, argument=argument, is_part=is_part)
        rules.update(dict.fromkeys(names, rule))

    functional = "_c10d_functional::"
    add("all_reduce", "tensors", "c10d::allreduce_", "c10d::allreduce_coalesced_")
    add("all_gather", "output_tensor", "c10d::_allgather_base_")
    add("all_gather", "output_tensors", "c10d::allgather_")
    add("all_gather", "outputs", "c10d::allgather_into_tensor_coalesced_")
    add("all_gather", "output_lists", "c10d::allgather_coalesced_")
    add("reduce_scatter", "input_tensor", "c10d::_reduce_scatter_base_")
    add("reduce_scatter", "input_tensors", "c10d::reduce_scatter_")
    add("reduce_scatter", "inputs", "c10d::reduce_scatter_tensor_coalesced_")
    add("all_to_all", "input", "c10d::alltoall_base_", functional + "all_to_all_single")
    add("all_to_all", "input_tensors", "c10d::alltoall_")
    add("broadcast", "tensors", "c10d::broadcast_")
    add("reduce", "tensors", "c10d::reduce_")
    add("gather", "input_tensors", "c10d::gather_", is_part=True)
    add("scatter", "output_tensors", "c10d::scatter_", is_part=True)
    add("send", "tensors", "c10d::send")
    add("recv", "tensors", "c10d::recv_", "c10d::recv_any_source_")
    add("send", "tensor", functional + "isend")
    add("recv", "tensor", functional + "irecv")
    for end in ("", "_"):
        add("all_reduce", "input", functional + "all_reduce" + end)
        add("all_reduce", "inputs", functional + "all_reduce_coalesced" + end)
        add("broadcast", "input", functional + "broadcast" + end)
    for end in ("", "_out"):
        gather, scatter = (
            f"{functional}all_gather_into_tensor",
            f"{functional}reduce_scatter_tensor",
        )
        add("all_gather", "input", gather + end, is_part=True)
        add("reduce_scatter", "input", scatter + end)
    add("all_gather", "inputs", f"{functional}all_gather_into_tensor_coalesced", is_part=True)
    add("reduce_scatter", "inputs", f"{functional}reduce_scatter_tensor_coalesced")
    return rules


_RULES: Mapping[str, _Rule] = _rules()


def _size(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _kept(values: Mapping[str, Any], payload: int, ranks: int, rank: int) -> Fraction:
    """Return the bytes of an all-to-all's input that this rank keeps."""
    if "input_tensors" in values:
        return Fraction(_size(values["input_tensors"][rank]))
    splits = values["input_split_sizes"]
    return Fraction(payload) * (
        Fraction(splits[rank], sum(splits) or 1) if splits else Fraction(1, ranks)
    )


def _sent(
    operation: str, values: Mapping[str, Any], payload: int, ranks: int, rank: int
) -> Fraction:
    whole, others = Fraction(payload), Fraction(ranks - 1, ranks)
    root = values.get("root_rank", values.get("src"))
    formulas: dict[str, Callable[[], Fraction]] = {
        "all_reduce": lambda: 2 * others * whole,
        "all_gather": lambda: others * whole,
        "reduce_scatter": lambda: others * whole,
        "all_to_all": lambda: whole - _kept(values, payload, ranks, rank),
        "broadcast": lambda: whole if rank == root else Fraction(0),
        "scatter": lambda: others * whole if rank == root else Fraction(0),
        "gather": lambda: whole / ranks if rank != root else Fraction(0),
        "reduce": lambda: whole if rank != root else Fraction(0),
        "send": lambda: whole,
        "recv": lambda: Fraction(0),
    }
    return formulas[operation]()


@dataclass
class _Count:
    calls: int = 0
    payload: int = 0
    sent: Fraction = field(default_factory=Fraction)

    def add(self, other: "_Count") -> None:
        self.calls += other.calls
        self.payload += other.payload
        self.sent += other.sent


class Ledger(TorchDispatchMode):
    """Counts the communication of this rank while it is entered; entering again goes on counting.

    It sees forward and backward passes, FSDP2, DTensor, functional collectives and point-to-point.

    Args:
        axes: Axis name -> the group of this rank along it. If two axes have the same group, the
            first counts.

    Example:
        >>> with Ledger({"tp": mesh.get_group("tp")}) as ledger:
        ...     model(batch).sum().backward()
        >>> ledger.total(axis="tp", operation="all_gather").sent
    """

    def __init__(self, axes: Mapping[str, dist.ProcessGroup] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes: dict[str, str] = {}
        for axis, group in (axes or {}).items():
            self._axes.setdefault(group.group_name, axis)
        self._counts: dict[tuple[str, str], _Count] = {}

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Return what was counted, by axis (given ones first, in their order) and operation."""
        order = list(self._axes.values())
        place = {axis: number for number, axis in enumerate(order)}
        keys = sorted(self._counts, key=lambda k: (place.get(k[0], len(order)), *k))
        return tuple(_entry(axis, op, self._counts[axis, op]) for axis, op in keys)

    def total(self, *, axis: str | None = None, operation: str | None = None) -> LedgerEntry:
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
        """Forget what was counted."""
        self._counts.clear()

    def __str__(self) -> str:
        head = ("axis", "operation", "calls", "payload [B]", "sent [B]")
        rows = [head, *(_cells(e) for e in (*self.entries(), self.total()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(f"{{:{'<' if i < 2 else '>'}{w}}}" for i, w in enumerate(widths))
        return "\n".join(form.format(*row) for row in rows)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, then count it if it communicates."""
        result = func(*args, **(kwargs or {}))
        namespace = func._schema.name.partition("::")[0]
        if namespace in ("c10d", "_c10d_functional"):
            names = [a.name for a in func._schema.arguments]
            values = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if func._schema.name == "_c10d_functional::batch_p2p_ops":
                for op, tensor in zip(values["op_list"], values["tensors"], strict=True):
                    self._count("recv" if "recv" in op else "send", _size(tensor), values)
            elif func._schema.name in _RULES:
                rule = _RULES[func._schema.name]
                size = _size(values[rule.argument])
                parts = _group(values).size() if rule.is_part else 1
                self._count(rule.operation, size * parts, values)
        return result

    def _count(self, operation: str, payload: int, values: Mapping[str, Any]) -> None:
        group = _group(values)
        sent = _sent(operation, values, payload, group.size(), group.rank())
        world = dist.group.WORLD is not None and group.group_name == dist.group.WORLD.group_name
        axis = self._axes.get(group.group_name, "world" if world else group.group_name)
        count = self._counts.setdefault((axis, operation), _Count())
        count.add(_Count(calls=1, payload=payload, sent=sent))


def _group(values: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the group of a call: operators take it boxed, by name, or as it is."""
    given = values.get("process_group", values.get("group_name"))
    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, str):
        return dist.distributed_c10d._resolve_process_group(given)  # type: ignore[attr-defined, arg-type]
    return dist.ProcessGroup.unbox(given)


def _entry(axis: str, operation: str, count: _Count) -> LedgerEntry:
    return LedgerEntry(
        axis=axis,
        operation=operation,
        calls=count.calls,
        payload=count.payload,
        sent=round(count.sent),
    )


def _cells(e: LedgerEntry) -> tuple[str, ...]:
    return (e.axis, e.operation, f"{e.calls:,}", f"{e.payload:,}", f"{e.sent:,}")
