"""`load_from_checkpoint`: a LightningModule on one process, from a checkpoint of any form."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, TypeVar

import lightning.pytorch as pl
import torch

from lightning_par.checkpoint.export import export_checkpoint, verify_files
from lightning_par.checkpoint.file_system import place_of, UrlPath
from lightning_par.checkpoint.plain_file import check_state, damage, reading_plain
from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint, no_checkpoint
from lightning_par.errors import CheckpointError

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
        path: A folder, file or URL of this package, or a file or URL of Lightning.
        weights_only: False if you trust the checkpoint, so that pickles in it may be read.
        options: For ``load_from_checkpoint`` of the class: ``map_location``, ``strict``,
            hyper-parameters.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or needs to be trusted.
    """
    place = place_of(path)
    if isinstance(place, UrlPath) and not is_checkpoint(place):
        return module_class.load_from_checkpoint(path, weights_only=weights_only, **options)
    path = Path(path)
    options |= {"weights_only": weights_only}
    if is_checkpoint(place):
        reader = CheckpointReader(place)
        if isinstance(place, UrlPath) or place.is_dir():
            check_state(reader.state(0, unpickle=weights_only is False), path)
            # Lightning makes modules of files only. It maps nothing: the file is gone afterwards.
            with TemporaryDirectory() as folder:
                file = Path(folder) / "whole.ckpt"
                export_checkpoint(reader, file, unpickle=weights_only is False, optimizer=False)
                return module_class.load_from_checkpoint(file, **options)
        # A file of ours is what `torch.save` writes, which Lightning reads itself: weights, and
        # what torch has written below "data": the pickle, and tensors in the states of callbacks.
        verify_files(reader, ["weights", "data"])
    elif path.is_dir():
        raise no_checkpoint(path)
    state = _read_file(path, weights_only)
    # A hook of the module may put the weights in.
    has_hook = module_class.on_load_checkpoint is not pl.LightningModule.on_load_checkpoint
    if "state_dict" not in state and not has_hook:
        raise CheckpointError(
            "LP501",
            f"{path} has no entry 'state_dict', so it holds no weights. Use another checkpoint.",
        )
    try:
        return module_class.load_from_checkpoint(path, **options)
    except RuntimeError as error:
        # Headers between the tensors, at which a mapped file is not looked at.
        if "PytorchStreamReader" not in str(error):
            raise
        raise damage(path, error) from error


def _read_file(path: Path, weights_only: bool | None) -> Mapping[str, Any]:
    """Return what Lightning is about to read, for whose errors it passes on what torch says.

    Raises:
        CheckpointError: It is missing, damaged, no checkpoint, or needs to be trusted.
    """
    with reading_plain(path, trusts=weights_only is False):
        # Mapped, no tensor is read; an old file is no archive, and is read twice.
        is_mapped = zipfile.is_zipfile(path)
        found = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=weights_only)
    check_state(found, path)
    return cast(Mapping[str, Any], found)
