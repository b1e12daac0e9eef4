"""A bar, or lines of a log, for work that takes long: on standard error, without Lightning.

Bytes begin to move at once: their bar waits for a second, so that short work shows none. What is
counted in pieces, as blocks that are compiled, has its first piece late: its bar is there at once.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tqdm import tqdm

from lightning_par.checkpoint.progress import Advance

__all__ = ["DELAY", "progress_bar", "progress_of_command"]

DELAY = 1.0
"""Seconds before a bar of bytes appears."""
_LINES = 10.0
"""Seconds between two lines of a log."""


class _Bar(tqdm):  # type: ignore[misc]
    """A bar without the thread that tqdm starts to watch its own."""

    monitor_interval = 0


@contextmanager
def progress_bar(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show a bar with what is done and its rate.

    Args:
        name: What is done.
        total: Bytes or pieces; None: nobody knows.
        unit: "B", or the name of the pieces.

    Yields:
        What takes the bytes or pieces that were done.
    """
    of_bytes = unit == "B"
    size: dict[str, Any] = {"unit": "B", "unit_scale": True} if of_bytes else {"unit": f" {unit}"}
    size |= {"miniters": 1, "delay": DELAY if of_bytes else 0, "leave": False}
    silent = not sys.stderr.isatty()
    with _Bar(total=total, desc=name, disable=silent, file=sys.stderr, **size) as bar:
        yield bar.update


def progress_of_command(name: str, total: int | None, unit: str) -> AbstractContextManager[Advance]:
    """Show a bar on a terminal; elsewhere, as in a log, write lines.

    Args:
        name: What is done.
        total: Bytes or pieces; None: nobody knows.
        unit: "B", or the name of the pieces.
    """
    return (progress_bar if sys.stderr.isatty() else _lines)(name, total, unit)


@contextmanager
def _lines(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Write how much is done: at once where it is counted in pieces, then every few seconds."""
    due, completed = time.monotonic() + (DELAY if unit == "B" else 0), 0

    def size(count: int) -> str:
        return f"{tqdm.format_sizeof(count)}B" if unit == "B" else str(count)

    def done(count: int) -> None:
        nonlocal due, completed
        completed += count
        if time.monotonic() >= due:
            due = time.monotonic() + _LINES
            words = [size(completed), *([] if total is None else ["of", size(total)])]
            words += [] if unit == "B" else [unit]
            sys.stderr.write(f"{name}: {' '.join(words)}\n")
            sys.stderr.flush()

    done(0)
    yield done
