"""Where a traced model can be cut into pipeline stages.

Every stage runs the whole step; stubs stand for the blocks of other stages, and the one before its
first block answers with what it received (`lightning_par.engine.pipeline.stage`). So a container
can be cut if each block is called once, in order, and what a block reads is the output of the one
before it, of an earlier one that later stages receive, too, or can be computed from the batch and
from parameters that every stage holds. Containers that a model passes through one after the other,
such as the two halves of a U-Net, are cut as one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn, Tensor

from lightning_par.observe.recorder import Call, Operation, Trace, Value
from lightning_par.plan.block_partition import partition_blocks
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.stage_partition import (
    classify_units,
    edge_weights,
    Place,
)

__all__ = ["Cut", "find_cut", "frozen_parameters"]

_Label = tuple[str, str | int]
_CHOOSING = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})
"""Functions whose result has a size that depends on values."""
_EDGES: tuple[Place, Place] = ("first", "last")
_WRITES = ("index_add", "index_copy", "index_put", "masked_scatter", "scatter", "__setitem__")
"""Functions whose result has the shape of their first argument."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a model is cut.

    Attributes:
        containers: FQNs of the containers of blocks, in the order in which they run; empty: it
            cannot be cut.
        first: As in `ParallelPlan`.
        last: As in `ParallelPlan`.
        replicated: As in `ParallelPlan`.
        kept: As in `ParallelPlan`.
        refusal: Why it cannot be cut.
    """

    containers: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def blocks(self) -> str | tuple[str, ...] | None:
        """The containers as `ParallelPlan` names them."""
        return self.containers if len(self.containers) > 1 else next(iter(self.containers), None)

    def holds(self, name: str) -> bool:
        """Tell whether something stands inside of a container.

        Args:
            name: FQN of a module or parameter.
        """
        return name.startswith(tuple(f"{container}." for container in self.containers))


class _UncuttableError(Exception):
    """A container cannot be cut; says why."""


def find_cut(model: nn.Module, trace: Trace, stages: int) -> Cut:
    """Find the container whose cut into stages is the most even one.

    Args:
        model: Parameters may be on meta.
        trace: Of its forward, or of a step that calls it.
        stages: For which the cut is made; containers with fewer blocks come last.
    """
    # Before anything else: whatever the cut, micro-batches would change their statistics.
    normalized = [n for n, m in model.named_modules() if _keeps_batch_statistics(m)]
    if normalized:
        return Cut(
            refusal=(
                f"{normalized[0]} ({type(model.get_submodule(normalized[0])).__name__}) computes "
                "statistics over the batch, but a pipeline computes on micro-batches, so the "
                "result would differ. Use data parallelism, or a normalization over each sample "
                "(GroupNorm, LayerNorm)."
            )
        )
    chosen = _sized_by_values(trace)
    found: list[tuple[tuple[bool, float, int], Cut]] = []
    refused: list[tuple[int, str, str]] = []
    for containers in _candidates(model, trace):
        names = [f"{fqn}.{n}" for fqn in containers for n in _children(model, fqn)]
        try:
            cut = _cut(model, trace, containers, names)
            if any(value in chosen for call in trace.calls_of(names[1]) for value in call.inputs):
                raise _UncuttableError(
                    "the number of rows that its blocks get depends on values of tensors"
                )
        except _UncuttableError as error:
            size = sum(_size(model.get_submodule(fqn)) for fqn in containers)
            # Several containers are refused where each alone is, whose reasons say more.
            if len(containers) == 1:
                refused.append((size, containers[0], str(error)))
            continue
        # Enough blocks first, then the most even cut, then the most blocks.
        found.append(((len(names) < stages, _load(model, cut, names, stages), -len(names)), cut))
    # Code between an outer list and an inner one would run on stand-ins of its own parts.
    cuts = [cut for _, cut in found]
    found = [
        pair
        for pair in found
        if not any(outer.holds(inner) for outer in cuts for inner in pair[1].containers)
    ]
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    if refused:
        _, fqn, reason = max(refused)
        return Cut(refusal=f"{fqn} cannot be cut into pipeline stages: {reason}.")
    return Cut(
        refusal=f"{type(model).__name__} has no list of blocks (nn.ModuleList or nn.Sequential), "
        "so it cannot be cut into stages. Put its blocks into one list that its forward calls in "
        "order."
    )


def _candidates(model: nn.Module, trace: Trace) -> Iterator[tuple[str, ...]]:
    """Give what may be cut: each container, and those of one parent that are called in one place,
    in the order in which they run.
    """
    for parent, module in model.named_modules():
        together: dict[tuple[int, ...], list[tuple[int, str]]] = {}
        for name, child in module.named_children():
            fqn = f"{parent}.{name}" if parent else name
            listed = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            blocks = [*_children(model, fqn)]
            # A container that computes itself, or holds parameters, is a block and no list.
            if not listed or not blocks or next(child.parameters(recurse=False), None) is not None:
                continue
            if len(blocks) > 1:
                yield (fqn,)
            # Containers whose first blocks are called from one place run one after the other.
            for call in trace.calls_of(f"{fqn}.{blocks[0]}"):
                together.setdefault(call.outer, []).append((call.number, fqn))
        for ordered in map(sorted, together.values()):
            if len(ordered) > 1:
                yield tuple(fqn for _, fqn in ordered)


def _children(model: nn.Module, fqn: str) -> list[str]:
    return [name for name, _ in model.get_submodule(fqn).named_children()]


def _keeps_batch_statistics(module: nn.Module) -> bool:
    tracked = getattr(module, "running_mean", None) is not None
    named = "BatchNorm" in type(module).__name__
    return tracked or (named and hasattr(module, "momentum"))


def _sized_by_values(trace: Trace) -> set[Value]:
    """Return the tensors with a size that depends on values, such as the rows of one expert.

    Stages exchange tensors of one shape for every batch shape.
    """
    sizes: dict[Value, frozenset[int]] = {}
    for operation in trace.operations:
        # Of an operation that writes, the result has the size of what it writes to.
        whole = operation.inputs[: 1 if operation.name.startswith(_WRITES) else None]
        chosen = frozenset().union(*(sizes.get(value, ()) for value in whole))
        # At most so many rows (`rows[:capacity]`) are as many as there are below that.
        is_part = operation.name == "__getitem__" and bool(operation.inputs[:1]) and bool(chosen)
        if _chooses(operation) or (is_part and operation.inputs[0] in sizes):
            chosen |= {value.shape[0] for value in operation.outputs if value.shape}
        for value in operation.outputs:
            if chosen & {*value.shape}:
                sizes[value] = chosen & {*value.shape}
    return {*sizes}


def _chooses(operation: Operation) -> bool:
    if operation.name == "__getitem__":
        return any(value.dtype == torch.bool for value in operation.inputs[1:])
    conditions = operation.name == "where" and len(operation.args) == 1
    return conditions or operation.name in _CHOOSING


def _size(part: nn.Module | Tensor) -> int:
    """Return what a part costs: with a gradient and two moments, if it is trained."""
    parameters = [part] if isinstance(part, Tensor) else part.parameters()
    # Gradient and two moments of Adam: four times a frozen one.
    return sum(p.numel() * (4 if p.requires_grad else 1) for p in parameters)


def _load(model: nn.Module, cut: Cut, names: Sequence[str], stages: int) -> float:
    """Return the size of the fullest stage, if the blocks are divided as a run divides them."""
    parts = {**dict(model.named_modules()), **dict(model.named_parameters(remove_duplicate=False))}
    # As a run would place what is around the blocks.
    units = classify_units(model, _plan_of(cut))
    weights = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in names]
    counts = partition_blocks(weights, edge_weights(model, units), min(stages, len(names)))
    sizes = {
        place: sum(_size(parts[u]) for u, p in units.items() if p == place) for place in _EDGES
    }
    loads, start = [], 0
    for count in counts:
        loads.append(sum(_size(parts[name]) for name in names[start : start + count]))
        start += count
    loads[0] += sizes["first"]
    loads[-1] += sizes["last"]
    return float(max(loads) + sum(_size(parts[name]) for name in cut.replicated))


def _cut(model: nn.Module, trace: Trace, containers: tuple[str, ...], names: Sequence[str]) -> Cut:
    calls = _block_calls(trace, names)
    flow = _Flow(model, trace, calls, names)
    uses = flow.parameters()
    named = model.named_parameters(remove_duplicate=False)
    used = {name: uses.get(name, frozenset()) for name, _ in named}
    units = classify_units(model, _plan_of(Cut(containers=containers)))
    read_by_step, has_evaluation = _read_by_step(trace), _has_evaluation(model)
    roles: dict[Place, list[str]] = {"first": [], "last": [], "every": []}
    # A role is declared only where it differs from what `classify_units` would say by itself.
    for unit, default in units.items():
        for name, place in _roles(model, unit, used):
            # Each stage runs the step, and so the code that reads it.
            if place == "first" and name in read_by_step:
                place = "every"
            # An evaluation may call what the training step leaves alone, such as a copy of the
            # model with averages of its weights.
            if place is None and has_evaluation and frozen_parameters(model, name):
                place = "every"
            # Stubs of the last stage's modules raise when an earlier stage calls them.
            if place == "last" and _is_called_early(trace, name, calls[-1]):
                place = "every"
            if place is not None and place != default:
                roles[place].append(name)
    cut = Cut(
        containers=containers,
        first=tuple(roles["first"]),
        last=tuple(roles["last"]),
        replicated=tuple(roles["every"]),
        kept=tuple(names[index] for index in sorted(flow.kept)),
    )
    for unit, place in classify_units(model, _plan_of(cut)).items():
        # Later stages have a stand-in for it, which can be called, and not be taken apart.
        is_used = any(where for name, where in used.items() if name.startswith(f"{unit}."))
        if place == "first" and is_used and not trace.calls_of(unit):
            raise _UncuttableError(f"{unit} is used before the blocks, but not called as a module")
    return cut


def _read_by_step(trace: Trace) -> set[str]:
    """Return the parameters that code outside of every module reads, which each stage runs."""
    return {
        value.name
        for operation in trace.operations
        if not operation.calls
        for value in operation.inputs
        if value.kind == "parameter"
    }


def _has_evaluation(model: nn.Module) -> bool:
    """Whether a LightningModule has a step of evaluation that is not Lightning's own."""
    steps = (getattr(model, f"{kind}_step", None) for kind in ("validation", "test", "predict"))
    return any(not step.__module__.startswith("lightning.") for step in steps if callable(step))


def frozen_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters that a module, or a parameter, of that FQN holds; empty if one of them
    is trained.
    """
    every = model.named_parameters(remove_duplicate=False)
    held = [p for n, p in every if n == name or n.startswith(f"{name}.")]
    return [] if any(p.requires_grad for p in held) else held


def _is_called_early(trace: Trace, name: str, block: Call) -> bool:
    """Tell whether a module is called before the last block, as a stage that lacks it may do."""
    calls = (call for call in trace.calls[: block.number] if call.number not in block.outer)
    return any(call.fqn == name or call.fqn.startswith(f"{name}.") for call in calls)


def _plan_of(cut: Cut) -> ParallelPlan:
    return ParallelPlan(
        blocks=cut.blocks,
        first=cut.first,
        last=cut.last,
        replicated=cut.replicated,
        kept=cut.kept,
    )


def _block_calls(trace: Trace, names: Sequence[str]) -> list[Call]:
    calls = []
    for name in names:
        made = trace.calls_of(name)
        if len(made) != 1:
            how = "is not called" if not made else f"is called {len(made)} times"
            raise _UncuttableError(
                f"its block {name} {how} in a step, but a pipeline runs each block once"
            )
        calls += made
    # In the order in which the container lists them: a pipeline has no other.
    if [c.number for c in calls] != sorted(c.number for c in calls):
        raise _UncuttableError("its blocks are not called in their order")
    # Blocks that several modules call cannot be left out of one of them.
    if len({c.outer for c in calls}) > 1:
        raise _UncuttableError("its blocks are called by different modules")
    return calls


def _roles(
    model: nn.Module, unit: str, used: dict[str, frozenset[str | int]]
) -> Iterator[tuple[str, Place | None]]:
    """Give where a unit belongs, or each of its parts if they belong to several places."""
    if unit in used:
        yield unit, _place(used[unit])
        return
    module = model.get_submodule(unit)
    inside = [f"{unit}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
    # None: nobody reads it, so that it may be anywhere.
    places = {_place(used[n]) for n in inside} - {None}
    if len(places) <= 1:
        yield unit, next(iter(places), None)
        return
    for name, _ in module.named_parameters(recurse=False):
        yield f"{unit}.{name}", _place(used[f"{unit}.{name}"])
    for name, _ in module.named_children():
        yield from _roles(model, f"{unit}.{name}", used)


def _place(targets: frozenset[str | int]) -> Place | None:
    if not targets:
        return None
    if targets == {"after"}:
        return "last"
    # {0}: only the first block needs it; others are needed at several places.
    return "first" if targets == {0} else "every"


class _Flow:
    """Follows values outside of the blocks; raises where a cut would lose one.

    Attributes:
        kept: Numbers of the blocks whose output is read after the next block, too.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, calls: Sequence[Call], names: Sequence[str]
    ) -> None:
        self.trace, self.calls, self.names = trace, calls, names
        self.kept: set[int] = set()
        first: dict[int, str] = {}
        self._aliases: dict[str, list[str]] = {}  # the trace knows the first name of a parameter
        for name, parameter in model.named_parameters(remove_duplicate=False):
            known = first.setdefault(id(parameter), name)
            self._aliases.setdefault(known, []).append(name)
        self._block_of = {call.number: index for index, call in enumerate(calls)}
        self._labels: dict[Value, frozenset[_Label]] = {}
        for index, call in enumerate(calls):
            for place, value in enumerate(call.outputs):
                # An output that a block only hands on belongs to the one that made it.
                if self._made_in(value) == index:
                    label = ("hidden" if place == 0 else "side", index)
                    self._labels.setdefault(value, frozenset({label}))

    def _block(self, outer: Sequence[int]) -> int | None:
        return next((self._block_of[n] for n in outer if n in self._block_of), None)

    def _made_in(self, value: Value) -> int | None:
        if value.maker is None:
            return None
        return self._block(self.trace.operations[value.maker].calls)

    def parameters(self) -> dict[str, frozenset[str | int]]:
        """Return where the values of every parameter outside of the blocks are needed: numbers of
        blocks, and "after" for what is computed after the last one.
        """
        targets: dict[str, set[str | int]] = {}

        def need(labels: frozenset[_Label], target: str | int) -> None:
            # Sets have no order of their own, and refusals have to be alike on all ranks.
            for label, what in sorted(labels, key=repr):  # alike on every rank
                if label == "parameter":
                    targets.setdefault(str(what), set()).add(target)
                else:
                    self._check(label, int(what), target)

        done = len(self.calls)
        for index, operation in enumerate(self.trace.operations):
            block = self._block(operation.calls)
            if block is not None:
                for value in operation.inputs:
                    if self._enters(value, block):
                        need(self._label(value, operation), block)
            # A number of Python, read from a tensor: each stage would read its own.
            elif index in self.trace.leaks:
                labels = {kind for v in operation.inputs for kind, _ in self._label(v)}
                if labels & {"hidden", "side", "inner"} and self._before_the_end(index):
                    raise _UncuttableError(
                        "the step converts an activation to a Python number between blocks"
                    )
        for index, call in enumerate(self.calls):
            for value in call.inputs:
                if self._enters(value, index):
                    need(self._label(value), index)
        for value in self.trace.result:
            need(self._label(value), "after")
        # Otherwise nothing differentiates the last block, nor those before it.
        if not any(("hidden", done - 1) in self._label(v) for v in self.trace.result):
            raise _UncuttableError("the result does not depend on its last block")
        return {name: frozenset(where) for name, where in targets.items()}

    def _before_the_end(self, index: int) -> bool:
        later = self.trace.operations[index:]
        return any(self._block(operation.calls) is not None for operation in later)

    def _enters(self, value: Value, block: int) -> bool:
        if value.kind == "parameter":
            inside = self.names[block] + "."
            # A parameter of the block itself, under any of its names, does not enter.
            return not any(name.startswith(inside) for name in self._aliases[value.name])
        return self._made_in(value) != block

    def _check(self, label: str, source: int, target: str | int) -> None:
        name = self.names[source]
        wanted = len(self.calls) if target == "after" else int(target)
        where = "after the blocks" if target == "after" else f"by {self.names[int(target)]}"
        # Hidden states of an earlier block: they are sent to all later stages.
        if label == "hidden" and source < wanted - 1:
            self.kept.add(source)
        if label == "side" and source >= wanted:
            raise _UncuttableError(f"an output of {name} is used {where}")
        if label == "inner":
            raise _UncuttableError(
                f"a tensor that {name} computes and does not return is used {where}"
            )
        if label == "owned":
            raise _UncuttableError(f"a parameter of {name} is used {where}")
        if label == "unknown":
            raise _UncuttableError(f"a tensor of unknown origin is used {where}")

    def _label(self, value: Value, reader: Operation | None = None) -> frozenset[_Label]:
        """Return what a value outside of the blocks depends on, back to outputs of blocks."""
        if value.kind == "parameter":
            return self._label_of_parameter(value, reader)
        stack = [value]
        # A stack of our own: a deep model would exceed Python's recursion.
        while stack:
            top = stack[-1]
            if top in self._labels:
                stack.pop()
                continue
            waiting = self._ask(top)
            if waiting:
                stack += waiting
            else:
                stack.pop()
        return self._labels[value]

    def _ask(self, value: Value) -> list[Value]:
        """Label a value, or return the values that have to be labeled before."""
        inner = self._made_in(value)
        if value.kind == "unknown":
            self._labels[value] = frozenset({("unknown", 0)})
        elif inner is not None:
            self._labels[value] = frozenset({("inner", inner)})
        elif value.maker is None:
            self._labels[value] = frozenset()
        else:
            operation = self.trace.operations[value.maker]
            inputs = [v for v in operation.inputs if v.kind != "parameter"]
            waiting = [v for v in inputs if v not in self._labels]
            if waiting:
                return waiting
            # Operations outside of blocks read parameters of modules around them.
            read = (v for v in operation.inputs if v.kind == "parameter")
            labels = [self._label_of_parameter(v, operation) for v in read]
            self._labels[value] = frozenset().union(*labels, *(self._labels[v] for v in inputs))
        return []

    def _label_of_parameter(self, value: Value, reader: Operation | None) -> frozenset[_Label]:
        """Label a parameter by its name in the module that reads it, or by all its names."""
        names = self._aliases[value.name]
        if reader is not None:
            active = {self.trace.calls[number].fqn for number in reader.calls}
            # By the module that is at work: a tie may belong to a block by its other name.
            names = [n for n in names if n.rpartition(".")[0] in active] or names
        labels: set[_Label] = set()
        for name in names:
            owner = next((i for i, n in enumerate(self.names) if name.startswith(n + ".")), -1)
            labels.add(("parameter", name) if owner < 0 else ("owned", owner))
        return frozenset(labels)
