"""Hooks of a strategy before its `setup`, as where a module is connected and no run follows."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast, TypeVar

from lightning.pytorch.strategies.parallel import ParallelStrategy

__all__ = ["plain_before_setup"]

H = TypeVar("H", bound=Callable[..., Any])


def plain_before_setup(hook: H) -> H:
    """Decorate a hook of a strategy: before the first `setup`, Lightning's own one answers instead.

    Until then the module is whole and plain, so that ``trainer.save_checkpoint`` after
    ``trainer.strategy.connect(module)`` writes what any strategy would.

    Args:
        hook: Method of a strategy with `_is_set_up`.
    """
    plain: Callable[..., Any] = getattr(ParallelStrategy, hook.__name__)

    @wraps(hook)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (hook if self._is_set_up() else plain)(self, *args, **kwargs)

    return cast(H, chosen)
