"""A bar for what takes long before, between and after the steps of a run.

It is on rank 0, on the terminal of the standard error. Where Lightning's own bars are off
(``Trainer(enable_progress_bar=False)``), or standard error is no terminal, there is none; commands
write lines there. While Lightning's rich bars are drawn, it is one of them.

Bytes begin to move at once: their bar waits for a second, so that short work shows none. What is
counted in pieces, as blocks that are compiled, has its first piece late: its bar is there at once.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from tqdm import tqdm

from lightning_par.checkpoint.progress import Advance, Show

__all__ = ["progress_bar", "progress_of", "progress_of_command"]

_DELAY = 1.0
"""Seconds before a bar of bytes appears."""
_PERIOD = 0.1
_LINES = 10.0
"""Seconds between two lines of a log."""
_MEGA = 1e6


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
    size |= {"miniters": 1, "delay": _DELAY if of_bytes else 0, "leave": False}
    silent = not sys.stderr.isatty()
    # Disabled and not left out: the caller gets what takes counts either way.
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
    due, completed = time.monotonic() + (_DELAY if unit == "B" else 0), 0

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


def progress_of(trainer: pl.Trainer | None) -> Show:
    """Return what shows the work of a run.

    Args:
        trainer: Its Trainer; None: nothing is shown.
    """

    @contextmanager
    def show(name: str, total: int | None, unit: str) -> Iterator[Advance]:
        bars = None if trainer is None else trainer.progress_bar_callback
        if trainer is None or bars is None or not trainer.is_global_zero:
            yield lambda _: None
            return
        drawn = bars.progress if isinstance(bars, RichProgressBar) else None
        shown = progress_bar(name, total, unit)
        # Two live displays on one terminal would overwrite each other.
        if drawn is not None and drawn.live.is_started:
            shown = _rich_bar(drawn, name, total, unit)
        with shown as moved:
            yield moved

    return show


@contextmanager
def _rich_bar(drawn: Any, name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Add a bar to those of rich, whose columns count megabytes or pieces as they do batches."""
    size, label, delay = (_MEGA, "MB", _DELAY) if unit == "B" else (1, unit, 0.0)
    begin = time.monotonic() + delay
    last, completed, task = begin - _PERIOD, 0.0, None

    def done(count: int) -> None:
        nonlocal last, completed, task
        completed += count / size
        now = time.monotonic()
        if now < begin:  # what is short is not even told to rich
            return
        if task is None:
            parts = math.inf if total is None else total / size
            task = drawn.add_task(f"{name} ({label})", total=parts)
        drawn.update(task, completed=completed)
        if now - last >= _PERIOD:
            last = now
            drawn.refresh()

    if not delay:
        done(0)
    try:
        yield done
    finally:
        if task is not None:
            drawn.remove_task(task)
