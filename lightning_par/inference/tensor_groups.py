"""Tensor styles of a traced model: pairs of linear layers, each proven on simulated ranks.

A group is a linear layer ("down", "out") and those whose outputs flow into it and nowhere else
("up" and "gate", "query", "key" and "value"). The sources become colwise and the sink rowwise, if
the module around them, run on simulated ranks, computes the same. Everything else is whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import nn

from lightning_par.inference.tensor_proof import Proof, prove_styles
from lightning_par.observe.recorder import Call, Operation, Trace, Value
from lightning_par.plan.tensor_styles import TensorStyle

__all__ = ["Groups", "find_groups", "is_linear", "owners_of", "signature"]

_HEADS, _GROUPS = re.compile(r"head|^h$|^nh$"), re.compile(r"group|kv")
_NO_COUNT = re.compile(r"dim|size|idx|index|scale|block|window")


@dataclass(eq=False, kw_only=True)
class Groups:
    """What was proven.

    Attributes:
        styles: FQN -> style of containers, of linear layers, and of what stands between them.
        divided: FQN -> attributes that count heads or features.
    """

    styles: dict[str, TensorStyle] = field(default_factory=dict)
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Linear:
    fqn: str
    module: nn.Linear
    index: int
    operation: Operation


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module computes what `nn.Linear` does, with a weight of its own."""
    # A subclass with its own forward may compute anything.
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain and module is not None and "weight" in module._parameters


def owners_of(model: nn.Module) -> dict[str, frozenset[str]]:
    """Return, for the first name of every parameter, the modules that hold it."""
    first: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for owner, module in model.named_modules():  # a module with several names, by its first
        named = module.named_parameters(owner, recurse=False, remove_duplicate=False)
        for name, parameter in named:
            found.setdefault(first.setdefault(id(parameter), name), set()).add(owner)
    return {name: frozenset(owners) for name, owners in found.items()}


def find_groups(model: nn.Module, trace: Trace, ranks: int, whole: frozenset[str]) -> Groups:
    """Find the groups of a model, and prove them.

    Args:
        model: Parameters may be on meta.
        trace: Of its forward, or of a step that calls it.
        ranks: Tensor-parallel degree for which the styles are proven.
        whole: FQNs of modules that have to stay whole.
    """
    found = Groups()
    linears = _linears(model, trace, whole)
    proven: dict[str, tuple[dict[str, TensorStyle], dict[str, tuple[str, ...]]] | None] = {}
    # In the order of the forward: layers that are taken are in no second group.
    for sources, sink in _pairs(trace, linears):
        taken = [m.fqn for m in (*sources, sink) if m.fqn in found.styles]
        sizes = [*(s.module.out_features for s in sources), sink.module.in_features]
        call = _around(trace, (*sources, sink))
        if taken or call is None or any(size % ranks for size in sizes):
            continue
        # Names as seen from the module around, so that equal blocks have equal keys.
        names = [_below(m.fqn, call.fqn) for m in (*sources, sink)]
        key = f"{names}{signature(call)}"
        if key not in proven:
            proven[key] = _prove(call, names[:-1], names[-1], sources, sink, ranks)
        result = proven[key]
        if result is None:
            continue
        dot = call.fqn + "." if call.fqn else ""
        found.styles |= {(dot + n if n else call.fqn): s for n, s in result[0].items()}
        found.divided |= {(dot + n if n else call.fqn): a for n, a in result[1].items()}
    return found


def _linears(model: nn.Module, trace: Trace, whole: frozenset[str]) -> dict[int, _Linear]:
    """Return the linear layers that are called once, by the index of their operation."""
    shared = {o for owners in owners_of(model).values() if len(owners) > 1 for o in owners}
    times: dict[str, int] = {}
    for call in trace.calls:
        times[call.fqn] = times.get(call.fqn, 0) + 1
    found = {}
    for index, operation in enumerate(trace.operations):
        if operation.name != "linear" or not operation.calls:
            continue
        call = trace.calls[operation.calls[-1]]
        # Called twice, a layer would need two places in its group.
        if times[call.fqn] == 1 and is_linear(call.module) and call.fqn not in shared | whole:
            found[index] = _Linear(
                fqn=call.fqn,
                module=call.module,
                index=index,
                operation=operation,
            )
    return found


def _pairs(
    trace: Trace, linears: Mapping[int, _Linear]
) -> Iterator[tuple[tuple[_Linear, ...], _Linear]]:
    """Give every sink with its sources."""
    consumers, result = trace.consumers(), frozenset(trace.result)
    reached: dict[int, int | None] = {}
    # A sink with all layers that flow into it, if they flow nowhere else.
    for index, sink in linears.items():
        sources = _sources(trace, linears, sink)
        if not sources:
            continue
        for source in sources:
            if source not in reached:
                reached[source] = _only_sink(trace, linears, linears[source], consumers, result)
        # Otherwise a shard would reach code that wants the whole.
        if all(reached[source] == index for source in sources):
            yield tuple(linears[s] for s in sorted(sources)), sink


def _sources(trace: Trace, linears: Mapping[int, _Linear], sink: _Linear) -> set[int]:
    """Return the linear layers whose outputs reach the input of `sink` before any other layer."""
    found: set[int] = set()
    stack, seen = [sink.operation.inputs[0]], set[Value]()
    while stack:
        value = stack.pop()
        if value in seen or value.maker is None:
            continue
        seen.add(value)
        if value.maker in linears:
            found.add(value.maker)
        else:
            stack += trace.operations[value.maker].inputs
    return found


def _only_sink(
    trace: Trace,
    linears: Mapping[int, _Linear],
    source: _Linear,
    consumers: Mapping[Value, Sequence[int]],
    result: frozenset[Value],
) -> int | None:
    """Return the one layer that the output of `source` reaches; None if it goes elsewhere, too."""
    sink: int | None = None
    stack, seen = list(source.operation.outputs), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        # The result of the model has to be whole.
        if value in result:
            return None
        for index in consumers.get(value, ()):
            # The input of another layer, and not its weight, as of a hypernetwork.
            if index in linears and linears[index].operation.inputs[0] is value:
                if sink not in (None, index):
                    return None
                sink = index
            else:
                stack += trace.operations[index].outputs
    return sink


def _around(trace: Trace, layers: Sequence[_Linear]) -> Call | None:
    """Return the innermost call of a module that all layers are called in."""
    stacks = [layer.operation.calls[:-1] for layer in layers]
    common = None
    # Stacks of calls, the outermost first.
    for numbers in zip(*stacks, strict=False):
        if len(set(numbers)) > 1:
            break
        common = numbers[0]
    return None if common is None else trace.calls[common]


def _below(fqn: str, prefix: str) -> str:
    return fqn[len(prefix) + 1 :] if prefix else fqn


def signature(call: Call) -> str:
    """Return what decides how a module computes: classes, numbers and shapes."""
    parts: list[Any] = [[(v.shape, v.dtype, v.requires_grad) for v in call.inputs]]
    for name, module in call.module.named_modules():
        plain = sorted(
            (k, v)
            for k, v in vars(module).items()
            if isinstance(v, bool | int | float | str | tuple) and not k.startswith("__")
        )
        own = [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__qualname__, plain, own))
    return repr(parts)


def _prove(
    call: Call,
    sources: Sequence[str],
    sink: str,
    layers: Sequence[_Linear],
    last: _Linear,
    ranks: int,
) -> tuple[dict[str, TensorStyle], dict[str, tuple[str, ...]]] | None:
    """Return the styles and the divided attributes of a group, as seen from the call's module."""
    inside: dict[str, TensorStyle] = {sink: "rowwise"}
    shared: dict[str, TensorStyle] = {"": "gather_sequence", **dict.fromkeys(sources, "colwise")}
    alone: dict[str, TensorStyle] = dict.fromkeys(sources, "colwise_alone")
    features = {last.module.in_features, *(s.module.out_features for s in layers)}
    # Within a container the input is gathered once for all sources; the model itself has none.
    for entry in (shared, alone) if call.outer else (alone,):
        # From the fewest attributes to the most: the first division that computes the same is
        # taken.
        for divided in _divisions(call.module, sink, features, ranks):
            styles = {**entry, **inside}
            proof = prove_styles(call, styles, divided, ranks)
            if proof is not None:
                between = _styles_between(call.module, styles, proof)
                if between is not None:
                    return {**between, **styles}, divided
    return None


def _styles_between(
    module: nn.Module, styles: Mapping[str, TensorStyle], proof: Proof
) -> dict[str, TensorStyle] | None:
    """Give styles to modules whose whole parameters have partial gradients; None: one is mixed."""
    found: dict[str, TensorStyle] = {}
    for name in proof.partial:
        owner = name.rpartition(".")[0]
        # A module is of one style: all of its parameters have partial gradients, or none.
        own = {f"{owner}.{n}" if owner else n for n, _ in _own(module.get_submodule(owner))}
        if owner in styles or not own <= proof.partial:
            return None
        found[owner] = "replicated_with_grad_allreduce"
    return found


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _divisions(
    module: nn.Module, sink: str, features: set[int], ranks: int
) -> list[dict[str, tuple[str, ...]]]:
    """Return attributes that may have to be divided: none, counts of heads, and also features."""
    heads: dict[str, list[str]] = {}  # of a module -> attributes
    groups: dict[str, list[str]] = {}
    sizes: dict[str, list[str]] = {}
    for holder in ["", *(sink[:i] for i in range(len(sink)) if sink[i] == ".")]:
        part = module.get_submodule(holder)
        for name, value in vars(part).items():
            # `type`, as a bool is an int.
            if type(value) is not int or value < ranks or value % ranks:
                continue
            if _HEADS.search(name) and not _NO_COUNT.search(name):
                heads.setdefault(holder, []).append(name)
            elif _GROUPS.search(name) and not _NO_COUNT.search(name):
                groups.setdefault(holder, []).append(name)
            elif value in features:
                sizes.setdefault(holder, []).append(name)
    found: list[dict[str, tuple[str, ...]]] = []
    for chosen in ([], [heads], [heads, groups], [heads, sizes], [heads, groups, sizes]):
        division: dict[str, tuple[str, ...]] = {}
        for part_of in chosen:
            for holder, names in part_of.items():
                division[holder] = (*division.get(holder, ()), *names)
        if division not in found:
            found.append(division)
    return found
