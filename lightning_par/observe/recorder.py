"""A traced forward: which module computed what, from which values.

Values are versions of tensors: what is written in place is a new value of every tensor that shares
the memory. Modules are seen by their hooks, functions by a `TorchFunctionMode`, so that a
function such as `F.linear` is one operation. A small model is run; of a larger one, on the meta
device, nothing is computed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn, Tensor

from lightning_par.dtensor import like_parameter
from lightning_par.engine.rng import fork_all_rng
from lightning_par.observe.watchers import (
    called_around,
    FunctionCall,
    ModuleCall,
    tensors_in,
    watch,
    Watcher,
)
from lightning_par.upstream.pytree import map_leaves
from lightning_par.upstream.tensor import memory_key

__all__ = [
    "Call",
    "Operation",
    "Trace",
    "Value",
    "called_around",
    "input_paths",
    "tensors_in",
    "trace_forward",
]

_RUN, _MOST_RUN = 5e6, 5e7  # parameters of a model that is run at once, or if it needs values
_TENSOR: Any = Tensor
# As a `TorchFunctionMode` sees the access of `p.grad`, and a change of `p.requires_grad`.
_OF_GRADIENTS = _TENSOR.grad.__get__, _TENSOR.requires_grad.__set__, Tensor.requires_grad_
_LEAKS = ("__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist")


@dataclass(frozen=True, eq=False, kw_only=True)
class Value:
    """A tensor as one operation left it.

    Attributes:
        kind: What made it; a "constant" is a tensor that the model keeps outside of its buffers,
            an "unknown" one was made out of sight from something that is trained.
        name: FQN of a parameter, also once it was written to, or of a buffer; path of an input.
        maker: Index of the operation that made it, or None.
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether it depends on something that is trained.
    """

    kind: Literal["parameter", "buffer", "input", "made", "constant", "unknown"]
    name: str = ""
    maker: int | None = None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """One call of a function of torch.

    Attributes:
        name: Of the function, such as ``"linear"``.
        inputs: Values, in the order of the arguments.
        outputs: Values.
        calls: Numbers of the calls of modules that it is part of, the outermost first.
        args: Positional arguments; None in the place of those with tensors.
        kwargs: Keyword arguments, without those with tensors.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    calls: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(eq=False, kw_only=True)
class Call:
    """One call of a module.

    Attributes:
        number: Its place in `Trace.calls`.
        fqn: The module's name.
        module: The module.
        outer: Numbers of the calls that it is part of, the outermost first.
        args: Positional arguments.
        kwargs: Keyword arguments.
        inputs: Values of the tensors in `args` and `kwargs`, in the order of `tensors_in`.
        outputs: Values of the tensors that it returned.
        done: Whether it returned.
    """

    number: int
    fqn: str
    module: nn.Module
    outer: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    done: bool = False


@dataclass(eq=False, kw_only=True)
class Trace:
    """What a forward did.

    Attributes:
        operations: In order.
        calls: In order of their starts.
        result: Values that the forward returned.
        leaks: Indices of operations that handed a computed number to Python.
    """

    operations: list[Operation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    result: tuple[Value, ...] = ()
    leaks: list[int] = field(default_factory=list)

    def consumers(self) -> dict[Value, list[int]]:
        """Return the indices of the operations that use each value."""
        found: dict[Value, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for value in dict.fromkeys(operation.inputs):
                found.setdefault(value, []).append(index)
        return found

    def calls_of(self, fqn: str) -> list[Call]:
        """Return the calls of a module."""
        return [call for call in self.calls if call.fqn == fqn]


def input_paths(batch: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a batch with their paths, as `BatchLayout` names them.

    Args:
        batch: A nest of mappings, lists, tuples and objects.
        prefix: Path of the batch itself.
    """
    if isinstance(batch, Tensor):
        yield prefix, batch
        return
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, list | tuple):
        items = enumerate(batch)
    else:
        items = (_attributes(batch) or {}).items()
    for key, value in items:
        yield from input_paths(value, f"{prefix}.{key}" if prefix else str(key))


def trace_forward(
    model: nn.Module,
    run: Callable[[Any], Any],
    example: Any,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Trace ``run(example)``.

    Args:
        model: Whole; parameters may be on meta. It is the same afterwards.
        run: Calls the model, or a step that does.
        example: A nest of tensors and other values.
        dtype: That of all floating weights in a run, and of tensors that it makes by default; None:
            they stay as they are.

    Raises:
        Exception: Whatever `run` raises.
    """
    size = sum(p.numel() for p in model.parameters())
    # Meta first: running a large model on the CPU takes minutes.
    if size > _RUN:
        try:
            return _trace(model, run, example, dtype, on_meta=True)
        except Exception:
            # Some code asks a tensor for its values, such as whether a mask is causal.
            if size > _MOST_RUN:
                raise
    return _trace(model, run, example, dtype, on_meta=False)


def _trace(
    model: nn.Module,
    run: Callable[[Any], Any],
    example: Any,
    dtype: torch.dtype | None,
    *,
    on_meta: bool,
) -> Trace:
    # With the same `requires_grad`, by which values are told apart.
    def stand_in(tensor: Tensor) -> Tensor:
        trains = tensor.requires_grad
        if on_meta:  # of which the values are not needed, nor a copy of them
            kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            made = torch.empty(tensor.shape, dtype=kind, device="meta")
            return made.requires_grad_(trains)
        tensor = tensor if dtype is None else _cast(tensor.detach(), dtype)
        if tensor.device.type == "meta":
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
            # Not zeros: a model's branch or a division may depend on the values.
            made = made.normal_(0, 0.02) if made.is_floating_point() else made
        else:
            made = tensor.detach().cpu().clone()
        return made.requires_grad_(trains)

    recorder = _Recorder()
    with ExitStack() as stack:
        # First in, last out: generators are put back when nothing draws any more.
        stack.callback(recorder.rewind)
        stack.enter_context(fork_all_rng(torch.device("cpu")))
        stack.enter_context(_preserved(model))
        stack.enter_context(torch.enable_grad())
        # Inside of `_preserved`, which puts the user's own parameters back.
        recorder.take_over(model, stand_in)
        weights = (p.dtype for p in model.parameters() if p.is_floating_point())
        held = next(weights, torch.float32)
        # Floating inputs in the dtype of the weights, as precision plugins convert them.
        batch = _with_tensors(example, lambda tensor: stand_in(_cast(tensor, held)))
        for path, tensor in input_paths(batch):
            recorder.name(tensor, kind="input", name=path)
        if on_meta:
            stack.enter_context(torch.device("meta"))  # what the forward makes is there, too
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        # Last: what is made above is no operation of the forward.
        stack.enter_context(watch(model, recorder))
        result = run(batch)
        recorder.trace.result = recorder.values(tensors_in(result))
    return recorder.trace


def _with_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with other tensors, also in the attributes of objects such as graphs."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        held = _attributes(value)
        if held is None:
            return value
        # A copy: the example is the user's batch.
        made = copy.copy(value)
        for name, inside in held.items():
            # Past a frozen dataclass's own.
            object.__setattr__(made, name, _with_tensors(inside, function))
        return made

    return map_leaves(changed, tree)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a batch that holds tensors; None of other values."""
    held = getattr(value, "__dict__", {})
    # Only objects with tensors: others are passed on as they are.
    is_held = not isinstance(value, Tensor | nn.Module) and any(map(tensors_in, held.values()))
    return dict(held) if is_held else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module at the end: what a forward counts, keeps, collects.

    Tensors are not copied, and lists, dicts and sets one level deep.
    """
    held = []
    for module in list(model.modules()):
        # `vars(module)` holds `_parameters` and `_buffers`, too: replaced stand-ins go with them.
        inside = {k: v.copy() for k, v in vars(module).items() if isinstance(v, dict | list | set)}
        held.append((module, dict(vars(module)), inside))
    try:
        yield
    finally:
        for module, attributes, inside in held:
            # Past `Module.__setattr__`, which would register again.
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, items in inside.items():
                container = attributes[name]
                container.clear()
                container.extend(items) if isinstance(items, list) else container.update(items)


class _Recorder(Watcher):
    def __init__(self) -> None:
        self.trace = Trace()
        self._active: list[int] = []
        self._inputs: tuple[Value, ...] = ()  # of the function that is called
        self._values: dict[int, Value] = {}  # by id of the tensor
        self._alive: list[Any] = []  # so that no id is used twice
        self._sharing: dict[int, list[Tensor]] = {}  # by key of the storage
        self._generators: dict[torch.Generator, Tensor] = {}

    def rewind(self) -> None:
        """Put the user's own generators back to where they were before the first draw."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def take_over(self, model: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> None:
        """Replace parameters and buffers by stand-ins; ties stay ties."""
        made: dict[int, Tensor] = {}
        for prefix, module in model.named_modules():
            dot = prefix + "." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                # Of tied parameters one stand-in, and one name: the first, as `named_parameters`
                # has it.
                if id(parameter) not in made:
                    plain = stand_in(parameter.detach())
                    made[id(parameter)] = like_parameter(parameter, plain)
                    self.name(made[id(parameter)], kind="parameter", name=dot + name)
                module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = stand_in(buffer)
                    self.name(made[id(buffer)], kind="buffer", name=dot + name)
                module._buffers[name] = made[id(buffer)]

    def before_module(self, call: ModuleCall) -> None:
        """Record a call."""
        number = len(self.trace.calls)
        self.trace.calls.append(
            Call(
                number=number,
                fqn=call.fqn,
                module=call.module,
                outer=tuple(self._active),
                args=call.args,
                kwargs=call.kwargs,
                inputs=self.values(tensors_in((call.args, call.kwargs))),
            )
        )
        self._active.append(number)

    def on_module(self, call: ModuleCall) -> None:
        """Record what it returned."""
        # Hooks are called in pairs, so the last call that began is the one that ends.
        recorded = self.trace.calls[self._active.pop()]
        recorded.outputs, recorded.done = self.values(tensors_in(call.output)), True

    def name(self, tensor: Tensor, *, kind: Any, name: str = "", maker: int | None = None) -> Value:
        """Give a tensor its value."""
        value = Value(
            kind=kind,
            name=name,
            maker=maker,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
        )
        # Kept alive, as its id would be given to another tensor after it.
        if id(tensor) not in self._values:
            self._alive.append(tensor)
            self._sharing.setdefault(memory_key(tensor), []).append(tensor)
        self._values[id(tensor)] = value
        return value

    def values(self, tensors: Sequence[Tensor]) -> tuple[Value, ...]:
        """Return the present values of tensors."""
        for tensor in tensors:
            if id(tensor) not in self._values:
                self._name_unseen(tensor)
        return tuple(self._values[id(tensor)] for tensor in tensors)

    def _name_unseen(self, tensor: Tensor) -> None:
        """Give a value to a tensor that was made where no function of torch was called."""
        if not tensor.requires_grad or not tensor.is_leaf:
            self.name(tensor, kind="unknown" if tensor.requires_grad else "constant")
            return
        # A parameter that the step makes has the memory of the tensor that it is made of.
        shared = self._sharing.get(memory_key(tensor))
        if not shared:
            self.name(tensor, kind="constant")
            return
        like = self._values[id(shared[-1])]
        self.name(tensor, kind=like.kind, name=like.name, maker=like.maker)

    def before_function(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note the values that it is given, and from where its generator draws."""
        generator = kwargs.get("generator")
        # `fork_all_rng` knows torch's own generators alone.
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()
        self._inputs = self.values(tensors_in((args, kwargs)))

    def on_function(self, call: FunctionCall) -> None:
        """Record an operation, and what it made or changed."""
        if call.function in _OF_GRADIENTS:
            return  # depends on no value of the parameter
        index, results = len(self.trace.operations), tensors_in(call.result)
        # The rest of the results were there before: arguments, perhaps changed in place.
        made = [t for t in results if id(t) not in self._values]
        if not call.written and not results:
            if call.name not in _LEAKS:
                return  # a shape or the like
            self.trace.leaks.append(index)
        for tensor in call.written:
            # All views of the memory have new values with it, also those made before.
            for other in self._sharing[memory_key(tensor)]:
                held = self._values[id(other)]
                # A parameter keeps its name, by which reads of it from outside are found.
                name = held.name if held.kind in ("parameter", "made") else ""
                self.name(other, kind="made", name=name, maker=index)
        for tensor in made:
            self.name(tensor, kind="made", maker=index)
        operation = Operation(
            name=call.name,
            inputs=self._inputs,
            outputs=self.values([*made, *call.written]),
            calls=tuple(self._active),
            args=tuple(None if tensors_in(v) else v for v in call.args),
            kwargs={k: v for k, v in call.kwargs.items() if not tensors_in(v)},
        )
        self.trace.operations.append(operation)
