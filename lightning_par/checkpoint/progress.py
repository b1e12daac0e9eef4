"""How far long work on bytes has come: what moves bytes says so, and a caller above may show it.

Without such a caller nothing is counted. A thread has none, so that what is saved in the background
shows nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

__all__ = ["Advance", "Show", "Work", "advance", "counted", "showing"]

Work = Literal["build", "read", "verify", "write"]
"""Values for parameters; tensors out of files; checksums of files; bytes into files."""
Advance = Callable[[int], object]
"""Takes the bytes that were moved since the last call."""
Show = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows work of that name and number of bytes while its context is open."""

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
def counted(work: Work, name: str, total: int) -> Iterator[None]:
    """Surrounds work whose bytes are counted.

    Args:
        work: What is counted; `advance` of another kind passes by.
        name: What is done, in a word or two, for people.
        total: Bytes that it will move on this rank.
    """
    show = _SHOW.get()
    if show is None or not total:
        yield
        return
    with show(name, total) as moved:
        token = _COUNTED.set((work, moved))
        try:
            yield
        finally:
            _COUNTED.reset(token)


def advance(work: Work, num_bytes: int) -> None:
    """Say that bytes were moved.

    Args:
        work: Kind of work.
        num_bytes: Bytes since the last call.
    """
    found = _COUNTED.get()
    if found is not None and found[0] == work:
        found[1](num_bytes)
