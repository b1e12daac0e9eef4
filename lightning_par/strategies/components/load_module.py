"""`load_from_checkpoint`: a LightningModule on one process, from a checkpoint of any form."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_par.checkpoint.export import export_checkpoint, verify_files
from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint

__all__ = ["load_from_checkpoint"]

M = TypeVar("M", bound=pl.LightningModule)


def load_from_checkpoint(
    module_class: type[M],
    path: str | Path,
    *,
    weights_only: bool | None = None,
    **options: Any,
) -> M:
    """Return a module with the weights and hyper-parameters of a checkpoint, on one process.

    The same as ``module_class.load_from_checkpoint(path, ...)``, which reads files only; this one
    reads folders, too, and compares the weights with their checksums before.

    Args:
        module_class: Class of the module.
        path: A folder or a file of this package, or a file or URL of Lightning.
        weights_only: False if you trust the checkpoint, so that pickles in it may be read.
        options: For ``load_from_checkpoint`` of the class: ``map_location``, ``strict``,
            hyper-parameters.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    if "://" in str(path) or not is_checkpoint(Path(path)):
        return module_class.load_from_checkpoint(path, weights_only=weights_only, **options)
    reader = CheckpointReader(Path(path))
    if reader.path.is_file():
        # A file of ours is what `torch.save` writes, which Lightning reads itself.
        verify_files(reader, ["weights"])
        return module_class.load_from_checkpoint(path, weights_only=weights_only, **options)
    # Lightning makes modules of files only. It maps nothing: the file is gone afterwards.
    with TemporaryDirectory() as folder:
        file = Path(folder) / "whole.ckpt"
        export_checkpoint(reader, file, unpickle=weights_only is False, optimizer=False)
        return module_class.load_from_checkpoint(file, weights_only=weights_only, **options)
