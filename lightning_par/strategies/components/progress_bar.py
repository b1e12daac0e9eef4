"""A bar for what takes long before, between and after the steps of a run.

It is on rank 0, on the terminal of the standard error. Where Lightning's own bars are off
(``Trainer(enable_progress_bar=False)``), or standard error is no terminal, there is none; commands
write lines there. While Lightning's rich bars are drawn, it is one of them.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

from lightning_par.checkpoint.progress import Advance, Show
from lightning_par.observe.terminal_bar import DELAY, progress_bar

__all__ = ["progress_of"]

_PERIOD = 0.1
_MEGA = 1e6


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
    size, label, delay = (_MEGA, "MB", DELAY) if unit == "B" else (1, unit, 0.0)
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
