"""How far a run has come, kept beside its checkpoints, for the run that goes on after it."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_par.upstream.lightning import callbacks_of

__all__ = ["RunProgress"]

_NAME = ".lightning_par-progress"
_logger = logging.getLogger(__name__)


class RunProgress(pl.Callback):
    """Says after a restart how many steps are computed again; on rank 0 only.

    A file in the folder of the checkpoints holds the number of optimizer steps. It is removed at
    the end of a run; one that was killed leaves it. Writing it is one system call per batch, half a
    microsecond: it goes to the page cache, from which a file system on the network gets it later.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._has_saved = False

    def begin(self, trainer: pl.Trainer, *, follows: bool) -> None:
        """Say what an earlier run in the same folder had done, and follow this one.

        Args:
            trainer: That of the run.
            follows: Whether also a run is followed that no other has left a file for.
        """
        saving = trainer.checkpoint_callback
        folder = getattr(saving, "dirpath", None)
        if folder is None or "://" in str(folder):
            return
        self._path = Path(folder) / _NAME
        # No file, or one that a killed process left empty.
        with suppress(OSError, ValueError):
            before, now = int(self._path.read_text()), trainer.global_step
            self._has_saved = True
            if before > now:
                _logger.warning(
                    "this run starts after step %d, but the previous run in %s had reached step "
                    "%d. The number of steps that are computed again is %d.%s",
                    *(now, folder, before, before - now),
                    "" if now else " Use ckpt_path='last' to continue from the last checkpoint.",
                )
        # Alone and without an earlier file, nothing is written: a plain run leaves no trace.
        if follows or self._has_saved:
            callbacks_of(trainer).append(self)

    @override
    def on_save_checkpoint(self, *_: Any) -> None:
        self._has_saved = True

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._has_saved or self._path is None:
            return  # the folder may not exist before
        with suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            # Always the same length at the same place: nothing is ever cut off.
            os.pwrite(self._descriptor, b"%020d\n" % trainer.global_step, 0)

    @override
    def on_train_end(self, *_: Any) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # the run is complete

    def close(self, trainer: pl.Trainer | None) -> None:
        """Leave the Trainer's callbacks; may be called again."""
        if trainer is not None and self in callbacks_of(trainer):
            callbacks_of(trainer).remove(self)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._path, self._descriptor, self._has_saved = None, None, False
