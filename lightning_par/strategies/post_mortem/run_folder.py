"""The folder in which a run leaves what it says of itself."""

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger

__all__ = ["checkpoint_folder", "find_folder"]


def find_folder(trainer: pl.Trainer) -> str | None:
    """Return where a run leaves its files: in the directory of its logger, or else, on several
    devices, in that of a ModelCheckpoint; None: it leaves none, as that of a tuner, or a
    fast_dev_run.

    **Communicates**: the directory of the logger, from rank 0.
    """
    if trainer.fast_dev_run or any(isinstance(each, DummyLogger) for each in trainer.loggers):  # type: ignore[attr-defined]
        return None
    if trainer.loggers and trainer.log_dir:
        return str(trainer.log_dir)
    if trainer.world_size == 1:  # where a folder of checkpoints holds what Lightning leaves in it
        return None
    return checkpoint_folder(trainer)


def checkpoint_folder(trainer: pl.Trainer) -> str | None:
    """Return the folder of the checkpoints, the same on all ranks; None: there is none."""
    folders = (getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks)
    return next((str(folder) for folder in folders if folder), None)
