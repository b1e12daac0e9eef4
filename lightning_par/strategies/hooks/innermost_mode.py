"""Takes a function mode off for a while, in which it would pass every function on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function, TorchFunctionMode

__all__ = ["asks_innermost", "without_mode"]


def _is_innermost(_: TorchFunctionMode) -> bool:
    """Tell whether a mode is the innermost: it answers itself, and any other one calls this."""
    return False


def asks_innermost(func: Any) -> bool:
    """Return whether a mode that is called with a function has to return whether it is the first
    argument of that function, see `without_mode`.
    """
    return func is _is_innermost


@contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Takes a mode off, which costs microseconds for every function that it passes on, unless
    another mode lies above it: torch takes off the innermost one only.

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
