"""Where a monitor draws its picture at the end of a run."""

from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

__all__ = ["last_picture"]


def last_picture(trainer: pl.Trainer, path: Path | None, name: str, *, draws: bool) -> Path | None:
    """Return the file for a picture, whose folder exists; None where none is drawn.

    Args:
        trainer: The Trainer whose run ends.
        path: The file that the user chose; None: `name` in the folder of the Trainer's logger.
        name: Name of the file.
        draws: Whether this rank has something to draw, and draws it.

    **Communicates**: a broadcast of the folder from rank 0, by Lightning.
    """
    folder = trainer.log_dir or trainer.default_root_dir
    if not draws:
        return None
    # An optional dependency: its absence must not fail a run that has trained.
    if find_spec("matplotlib") is None:
        rank_zero_warn(
            f"the picture {name} is not drawn, since matplotlib is not installed. Install it with: "
            'pip install "lightning-par[plot]"'
        )
        return None
    path = path or Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
