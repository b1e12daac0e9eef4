"""Hooks of a strategy before its `setup`, as where a module is connected and no run follows."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.pytorch.strategies.parallel import ParallelStrategy

__all__ = ["plain_before_setup"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def plain_before_setup(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let Lightning's own hook of the same name answer until the module is on the mesh once.

    Until then it is whole and plain, so that ``trainer.save_checkpoint`` after
    ``trainer.strategy.connect(module)`` writes what any strategy would.

    Args:
        hook: Method of a strategy with `_is_set_up`.
    """
    plain: Callable[..., R] = getattr(ParallelStrategy, hook.__name__)

    @wraps(hook)
    def chosen(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return (hook if self._is_set_up() else plain)(self, *args, **kwargs)

    return chosen
