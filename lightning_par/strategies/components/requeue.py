"""The checkpoint that Lightning saves before SLURM requeues a job, where the next run looks."""

import logging
import os
import re
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

__all__ = ["link_requeue_checkpoint"]

_log = logging.getLogger(__name__)


def link_requeue_checkpoint(path: str, trainer: pl.Trainer) -> None:
    """Let ``ckpt_path="last"`` find a checkpoint that was saved on SLURM's requeue signal.

    Lightning saves it in the Trainer's ``default_root_dir``, while "last" is the newest of those
    in the folder of a ModelCheckpoint whose name begins with "last". A link there is one of them.
    Does nothing where `path` is another checkpoint, or without such a folder.

    Args:
        path: Of the checkpoint; a save in the background may not be complete. On rank 0 only.
        trainer: The Trainer that saves it.
    """
    saving, saved = trainer.checkpoint_callback, Path(path)
    if not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", saved.name) or "://" in path:
        return
    # No folder is known before its `setup`.
    if not isinstance(saving, ModelCheckpoint) or "://" in str(saving.dirpath or "://"):
        return
    folder = Path(str(saving.dirpath))
    link = folder / f"{saving.CHECKPOINT_NAME_LAST}-requeue{saving.FILE_EXTENSION}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        # Relative: the folders may be mounted elsewhere for the next run.
        link.symlink_to(os.path.relpath(saved.resolve(), folder.resolve()))
    except OSError as error:
        text = "ckpt_path='last' will not find %s, since the link %s to it cannot be made: %s"
        _log.warning(text, path, link, error)
