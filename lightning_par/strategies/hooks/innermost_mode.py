"""Takes a function mode off for a while, in which it would pass every function on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function, TorchFunctionMode

__all__ = ["asks_innermost", "without_mode"]


def _is_innermost(_: TorchFunctionMode) -> bool:
    """Return False; called with the mode in question, if the innermost mode is another one.

    The mode itself answers True, and does not call this.
    """
    return False


def asks_innermost(func: Any) -> bool:
    """Return whether a call of `func` asks a mode whether it is the innermost one.

    The mode's ``__torch_function__`` then returns ``args[0] is self``; see `without_mode`.
    """
    return func is _is_innermost


@contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave a mode inside, if it is the innermost one; torch can leave no other.

    A mode that only passes functions on still costs microseconds for each of them.

    Args:
        mode: Entered already; its ``__torch_function__`` answers what `asks_innermost`.
    """
    given = (None,)  # which torch hands to the innermost mode, if there is any
    # Asked through torch's own dispatch: it has no public list of modes.
    if not has_torch_function(given) or not handle_torch_function(_is_innermost, given, mode):
        yield
        return
    entered: Any = mode
    entered.__exit__(None, None, None)
    try:
        yield
    finally:
        entered.__enter__()
