"""Weights in plain safetensors files, as Hugging Face and other programs write them."""

import json
from pathlib import Path

from safetensors import safe_open, SafetensorError

from lightning_par.checkpoint.index import Chunk, TensorEntry
from lightning_par.checkpoint.storage import DTYPES
from lightning_par.checkpoint.tensor_files import StoredTensors, TensorFiles
from lightning_par.errors import CheckpointError

__all__ = ["find_weights", "holds_weights_only"]


def find_weights(path: Path) -> StoredTensors:
    """Open weights without reading them: one safetensors file, or several with an index.

    Args:
        path: ``model.safetensors``; ``model.safetensors.index.json``, whose ``weight_map`` says
            which file holds which tensor; or a folder with one of the two.

    Raises:
        CheckpointError: The path is none of these, or a file is damaged.
    """
    # The index first: of a folder with both, the single file may be a part from elsewhere.
    if path.is_dir() and (path / "model.safetensors.index.json").exists():
        path = path / "model.safetensors.index.json"
    elif path.is_dir() and (path / "model.safetensors").exists():
        path = path / "model.safetensors"
    if path.name.endswith(".index.json") and path.is_file():
        files = _files_of(path)
    elif path.suffix == ".safetensors" and path.is_file():
        files = {path.name}
    else:
        raise CheckpointError(
            "LP501",
            f"{path} is no file with weights. Pass a .safetensors file, a "
            "model.safetensors.index.json, or a folder with one of them.",
        )
    folder = path.parent
    entries: dict[str, TensorEntry] = {}
    # Sorted: of a name in two files the last one wins, on every rank the same.
    for file in sorted(files):
        entries |= _entries_of(folder, file)
    return StoredTensors.of_files(TensorFiles(folder, follows_links=True), entries)


def holds_weights_only(path: Path) -> bool:
    """Return whether a path has a form that `find_weights` accepts; nothing is read."""
    names = ("model.safetensors.index.json", "model.safetensors")
    if path.is_dir():
        return any((path / name).exists() for name in names)
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def _files_of(index: Path) -> set[str]:
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "LP502",
            f"{index} cannot be read as an index of safetensors files ({error}). Use the "
            "index that belongs to the files.",
        ) from error
    # A downloaded index must not make us read files elsewhere on this machine.
    outside = [name for name in files if Path(str(name)).name != name]
    if outside:
        raise CheckpointError(
            "LP502",
            f"{index} lists {outside[0]!r}, but may only list files in its own folder. Use "
            "the index that belongs to the files.",
        )
    return files


def _entries_of(folder: Path, file: str) -> dict[str, TensorEntry]:
    """Return name -> entry for every tensor of one safetensors file."""
    found = {}
    try:
        with safe_open(folder / file, framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118  (not a dict)
                part = opened.get_slice(key)  # reads the header only
                shape = tuple(part.get_shape())
                chunk = Chunk(file, key, (0,) * len(shape), shape)
                found[key] = TensorEntry(DTYPES[part.get_dtype()], shape, (chunk,))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "LP502", f"{folder / file} cannot be read ({error}). Save or download the file again."
        ) from error
    return found
