"""What a step calls: functions of torch, operators, and modules, given to watchers.

Note [Functions and operators]: a function is what code calls, as `F.linear`, once per call and
without its backward. An operator is what torch then runs, as ``aten.addmm``, also in backwards and
in what activation checkpointing recomputes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.upstream.dispatch import TorchDispatchMode
from lightning_par.upstream.pytree import tree_leaves
from lightning_par.upstream.tensor import count_of_changes

__all__ = [
    "FunctionCall",
    "ModuleCall",
    "OperatorCall",
    "Watcher",
    "called_around",
    "tensors_in",
    "watch",
]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a nest in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionCall:
    """One call of a function of torch.

    Attributes:
        function: Such as `F.softmax` or `Tensor.add`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        result: What it returned.
        inputs: The tensors in `args` and `kwargs`, in order.
        written: Those that it has written to; of tensors made in inference mode, torch does not
            tell.
        modules: FQNs of the modules whose forwards it is part of, the outermost first.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    inputs: list[Tensor]
    written: list[Tensor]
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name, such as ``"softmax"``."""
        return str(getattr(self.function, "__name__", ""))


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorCall:
    """One call of an operator.

    Attributes:
        operator: Such as ``torch.ops.aten.addmm.default``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        result: What it returned.
        modules: FQNs of the modules whose forwards it is part of, the outermost first; none in a
            backward.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleCall:
    """One forward of a module.

    Attributes:
        fqn: Its name.
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: What it returned; None before.
    """

    fqn: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None


class Watcher:
    """Sees what a step calls. A subclass overrides what it wants to see.

    Examples:
        >>> class CountSoftmax(Watcher):
        ...     calls = 0
        ...
        ...     def on_function(self, call):
        ...         self.calls += call.name == "softmax"
        >>> counts = CountSoftmax()
        >>> with watch(nn.Softmax(dim=-1), counts) as module:
        ...     _ = module(torch.ones(2, 3))
        >>> counts.calls
        1
    """

    def before_function(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """See a function that will be called, where `on_function` is overridden, too."""

    def on_function(self, call: FunctionCall) -> None:
        """See a call of a function of torch, after it has returned."""

    def on_operator(self, call: OperatorCall) -> None:
        """See a call of an operator, after it has returned."""

    def before_module(self, call: ModuleCall) -> None:
        """See a module whose forward begins."""

    def on_module(self, call: ModuleCall) -> None:
        """See a module whose forward has returned."""


@contextmanager
def watch(module: nn.Module, *watchers: Watcher) -> Iterator[nn.Module]:
    """Give watchers what is called inside; gives the module.

    Nothing is installed that no watcher overrides. Compiled code is seen as one call.

    Args:
        module: Its forwards, and those of its parts, are watched.
        watchers: Are called in this order.
    """
    stack: list[ModuleCall] = []

    # Before the stack grows: a watcher of modules sees the call from outside.
    def begin(fqn: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        call = ModuleCall(fqn=fqn, module=part, args=args, kwargs=kwargs)
        for watcher in watchers:
            watcher.before_module(call)
        stack.append(call)

    def end(fqn: str, part: nn.Module, args: Any, output: Any) -> None:
        call = replace(stack.pop(), output=output)
        for watcher in watchers:
            watcher.on_module(call)

    with ExitStack() as opened:
        # Hooks first and modes last: the modes do not see what hooks of ours compute.
        opened.enter_context(called_around(module, begin, end))
        for mode, name in ((_Operators, "on_operator"), (_Functions, "on_function")):
            # A mode costs a call of Python for every operation, so only where one is wanted.
            seeing = [w for w in watchers if getattr(type(w), name) is not getattr(Watcher, name)]
            if seeing:
                opened.enter_context(mode(seeing, stack))
        yield module


@contextmanager
def called_around(
    model: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Call functions around the forward of every module inside.

    Args:
        model: A module.
        before: Takes the FQN, the module, its positional and its keyword arguments.
        after: Takes the FQN, the module, its positional arguments and its output.
    """
    with ExitStack() as hooks:
        for fqn, module in model.named_modules():
            # Not `always_call`: of a forward that raises, `after` is not called, and the watch
            # ends.
            first = module.register_forward_pre_hook(partial(before, fqn), with_kwargs=True)
            hooks.callback(first.remove)
            hooks.callback(module.register_forward_hook(partial(after, fqn)).remove)
        yield


def _changes(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else count_of_changes(tensor)


class _Functions(TorchFunctionMode):
    def __init__(self, watchers: list[Watcher], stack: list[ModuleCall]) -> None:
        super().__init__()
        self._watchers, self._stack = watchers, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = tensors_in((args, kwargs))
        for watcher in self._watchers:
            watcher.before_function(func, args, kwargs)
        # The version counter of each, which every writing in place advances, through views as
        # well.
        before = [_changes(tensor) for tensor in inputs]
        result = func(*args, **kwargs)
        call = FunctionCall(
            function=func,
            args=tuple(args),
            kwargs=kwargs,
            result=result,
            inputs=inputs,
            written=[t for t, n in zip(inputs, before, strict=True) if _changes(t) != n],
            modules=tuple(module.fqn for module in self._stack),
        )
        for watcher in self._watchers:
            watcher.on_function(call)
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, watchers: list[Watcher], stack: list[ModuleCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watchers, self._stack = watchers, stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        modules = tuple(module.fqn for module in self._stack)
        call = OperatorCall(operator=func, args=args, kwargs=kwargs, result=result, modules=modules)
        for watcher in self._watchers:
            watcher.on_operator(call)
        return result
