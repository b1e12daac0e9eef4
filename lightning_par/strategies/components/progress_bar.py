"""A bar for what takes longer than a second before, between and after the steps of a run.

It is on rank 0, on the terminal of the standard error. Where Lightning's own bars are off
(``Trainer(enable_progress_bar=False)``), or standard error is no terminal, there is none. While
Lightning's rich bars are drawn, it is one of them.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from tqdm import tqdm

from lightning_par.checkpoint.progress import Advance, Show

__all__ = ["progress_bar", "progress_of"]

_DELAY = 1.0
"""Seconds before a bar appears."""
_PERIOD = 0.1
_MEGA = 1e6


class _Bar(tqdm):  # type: ignore[misc]
    """A bar without the thread that tqdm starts to watch its own."""

    monitor_interval = 0


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Advance]:
    """Show a bar with bytes and their rate.

    Args:
        name: What is done.
        total: Bytes.

    Yields:
        What takes the bytes that were moved.
    """
    size: dict[str, Any] = {"unit": "B", "unit_scale": True, "miniters": 1}
    silent = not sys.stderr.isatty()
    with _Bar(
        total=total, desc=name, delay=_DELAY, leave=False, disable=silent, file=sys.stderr, **size
    ) as bar:
        yield bar.update


def progress_of(trainer: pl.Trainer | None) -> Show:
    """Return what shows the work of a run.

    Args:
        trainer: Its Trainer; None: nothing is shown.
    """

    @contextmanager
    def show(name: str, total: int) -> Iterator[Advance]:
        bars = None if trainer is None else trainer.progress_bar_callback
        if trainer is None or bars is None or not trainer.is_global_zero:
            yield lambda _: None
            return
        drawn = bars.progress if isinstance(bars, RichProgressBar) else None
        shown = progress_bar(name, total)
        if drawn is not None and drawn.live.is_started:
            shown = _rich_bar(drawn, name, total)
        with shown as moved:
            yield moved

    return show


@contextmanager
def _rich_bar(drawn: Any, name: str, total: int) -> Iterator[Advance]:
    """Add a bar to those of rich, whose columns count megabytes as they do batches."""
    begin = time.monotonic() + _DELAY
    last = begin - _PERIOD
    task = drawn.add_task(f"{name} (MB)", total=total / _MEGA, visible=False)

    def moved(num_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        drawn.update(task, advance=num_bytes / _MEGA, visible=now >= begin)
        if now - last >= _PERIOD:
            last = now
            drawn.refresh()

    try:
        yield moved
    finally:
        drawn.remove_task(task)
