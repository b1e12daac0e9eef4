"""Functions of other packages that users have imported under any name."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

__all__ = ["copied_function", "diverted", "replaced", "with_visible_calls"]

_TARGET = "lightning_par_diverted"


def _call_target(*args: Any, **kwargs: Any) -> Any:
    """Its code takes the place of that of a function, and looks the target up in its module."""
    return lightning_par_diverted(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def diverted(function: Callable[..., Any], to: Callable[..., Any]) -> Iterator[None]:
    """Let a function do what another does, for all who have imported it already.

    A new value for the name in its module would reach those only who look it up there.

    Args:
        function: A function written in Python, perhaps decorated.
        to: Takes the same arguments.
    """
    inner = cast(FunctionType, inspect.unwrap(function))
    name = f"{_TARGET}_{inner.__name__}"
    # The code of the function is what all who have imported it share. Its defaults go, too, as
    # arguments are passed on untouched.
    code = _call_target.__code__.replace(co_names=(name,))
    kept = inner.__code__, inner.__defaults__, inner.__kwdefaults__
    # Where it is diverted already: the outer target comes back at the end.
    before = {key: value for key, value in inner.__globals__.items() if key == name}
    inner.__globals__[name] = to
    inner.__code__, inner.__defaults__, inner.__kwdefaults__ = code, None, None
    try:
        yield
    finally:
        inner.__code__, inner.__defaults__, inner.__kwdefaults__ = kept
        del inner.__globals__[name]
        inner.__globals__.update(before)  # of an outer one, if there is one


def copied_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function, by which what it is `diverted` to can call the original.

    Args:
        function: A function written in Python, perhaps decorated. If it is diverted already, what
            it is diverted to is returned.
    """
    inner = cast(FunctionType, inspect.unwrap(function))
    target = inner.__globals__.get(f"{_TARGET}_{inner.__name__}")
    if target is not None:
        return cast(Callable[..., Any], target)
    made = FunctionType(inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


def with_visible_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function of torch, whose calls of other functions a mode sees.

    A function of `torch.nn.functional` hands itself to a `TorchFunctionMode` that is on, and runs
    without it. The copy runs at once, so that the mode gets what it calls.

    Args:
        function: A function written in Python that asks `has_torch_function` and its variants.
    """
    inner = cast(FunctionType, inspect.unwrap(function))
    # Made anew for each call, as another tool may replace a name of the module for a while.
    asked = {name: _has_none for name in inner.__globals__ if name.startswith("has_torch_function")}
    scope = {**inner.__globals__, **asked}
    made = FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


def _has_none(*_: Any) -> bool:
    """Stands for `torch.overrides.has_torch_function`."""
    return False


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a class, a module or an object another value for a while.

    Args:
        owner: What has it, or inherits it.
        name: Name of the attribute.
        value: What stands in its place inside.
    """
    own = vars(owner)
    absent = object()
    before = own.get(name, absent)  # as it is stored: getattr would bind a method
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is absent else setattr(owner, name, before)
