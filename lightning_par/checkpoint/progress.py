"""How far long work has come: what does it says so, and a caller above may show it.

Without such a caller nothing is counted. A thread has none, so that what is saved in the background
shows nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

__all__ = ["Advance", "Show", "Work", "advance", "counted", "showing"]

Work = Literal[
    "build",
    "read",
    "verify",
    "write",
    "blocks",
    "layouts",
    "measurements",
    "operations",
    "steps",
]
"""Bytes: values for parameters; tensors out of files; checksums of files; bytes into files. Pieces:
blocks that are compiled, layouts that are simulated, what their names say.
"""
Advance = Callable[[int], object]
"""Takes the bytes or pieces that were done since the last call."""
Show = Callable[[str, int | None, str], AbstractContextManager[Advance]]
"""Shows work of that name, number and unit while its context is open; None: nobody knows the
number. The unit is "B" or the plural of a piece's name.
"""

_BYTES = ("build", "read", "verify", "write")
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)
_COUNTED: ContextVar[tuple[Work, Advance] | None] = ContextVar("counted", default=None)


@contextmanager
def showing(show: Show) -> Iterator[None]:
    """Surrounds a run or a command, of which `show` shows what is counted."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextmanager
def counted(work: Work, name: str, total: int | None) -> Iterator[None]:
    """Surrounds work that is counted.

    Args:
        work: What is counted; `advance` of another kind passes by.
        name: What is done, in a word or two, for people.
        total: Bytes or pieces of this rank; None: not known before.
    """
    show = _SHOW.get()
    # Nobody watches, or nothing is to be done, for which a bar would stay at 0 %.
    if show is None or total == 0:
        yield
        return
    with show(name, total, "B" if work in _BYTES else work) as done:
        token = _COUNTED.set((work, done))
        try:
            yield
        finally:
            _COUNTED.reset(token)


def advance(work: Work, count: int = 1) -> None:
    """Say that bytes were moved, or pieces done.

    Args:
        work: Kind of work.
        count: How many since the last call.
    """
    found = _COUNTED.get()
    # Reading inside of writing (an export) advances only the bar that is shown.
    if found is not None and found[0] == work:
        found[1](count)
