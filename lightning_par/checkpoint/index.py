"""What a checkpoint says about itself: which file holds which slice of which tensor, and how long
every file is.

A checkpoint is a folder::

    manifest.json                            step, layout; length and checksum of every file
    index.json                               global name -> dtype, global shape, slices
    weights-00001-of-00004.safetensors       what rank 1 wrote of the weights
    optimizer-00001-of-00004.safetensors     and of the optimizer states
    state-00000-of-00004.json, .safetensors  loops, callbacks, schedulers, random generators

Names and shapes are those of one process; nothing in the index knows a mesh.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_par.checkpoint.storage import ChecksumFile, DTYPES, FileRecord
from lightning_par.errors import CheckpointError

__all__ = [
    "FORMAT",
    "INDEX",
    "MANIFEST",
    "Chunk",
    "Index",
    "Manifest",
    "TensorEntry",
    "file_name",
    "is_checkpoint_folder",
    "merge_entries",
]

FORMAT = 1
"""Number of the format; it grows when older code can no longer read what is written."""
MANIFEST, INDEX = "manifest.json", "index.json"
_KIND = "lightning_par checkpoint"


def file_name(kind: str, rank: int, world: int, suffix: str = "safetensors") -> str:
    """Return the name of a file of one rank.

    Args:
        kind: ``"weights"``, ``"optimizer"`` or ``"state"``.
        rank: Who wrote it.
        world: Of how many.
        suffix: Of the name.
    """
    return f"{kind}-{rank:05d}-of-{world:05d}.{suffix}"


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a path is meant to be a checkpoint of this format."""
    return (path / MANIFEST).exists() or (path / INDEX).exists()


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        file: Name inside the checkpoint.
        key: Of the tensor in that file.
        offset: First entry of the box in every dim of the global tensor.
        shape: Of the box.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor under its global name.

    Attributes:
        dtype: Of all its chunks.
        shape: Of the whole.
        chunks: Boxes that do not overlap and together are the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Entries of the whole."""
        return torch.Size(self.shape).numel()

    def is_complete(self) -> bool:
        """Return whether the chunks have as many entries as the whole."""
        return sum(torch.Size(chunk.shape).numel() for chunk in self.chunks) == self.numel


@dataclass(kw_only=True)
class Index:
    """Where everything is.

    Attributes:
        weights: Name -> where; a tied weight is there once.
        aliases: Further names of tied weights -> the name in `weights`.
        optimizer: ``"0/<weight>/exp_avg"`` (number of the optimizer, weight, state) -> where.
        groups: For every optimizer its groups: options, and the names of the parameters.
        values: What the states of modules and optimizers hold besides tensors, encoded; by
            ``"weights/<name>"`` or ``"optimizer/0/<weight>/<state>"``.
    """

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, TensorEntry] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON's types; `from_json` reads it."""
        return {
            "weights": _entries_to_json(self.weights),
            "aliases": self.aliases,
            "optimizer": _entries_to_json(self.optimizer),
            "groups": self.groups,
            "values": self.values,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Index":
        """Read what `to_json` gave."""
        return cls(
            weights=_entries_from_json(value["weights"]),
            aliases=dict(value["aliases"]),
            optimizer=_entries_from_json(value["optimizer"]),
            groups=value["groups"],
            values=dict(value["values"]),
        )

    def check_complete(self) -> None:
        """Refuse an index in which a part of a tensor is missing or there twice.

        Raises:
            CheckpointError: Names the first such tensor.
        """
        for kind, entries in (("weights", self.weights), ("optimizer", self.optimizer)):
            for name, entry in entries.items():
                if not entry.is_complete():
                    boxes = [(c.offset, c.shape) for c in entry.chunks]
                    raise CheckpointError(
                        f"{kind}: {name} has the shape {entry.shape}, which the boxes (offset, "
                        f"shape) {boxes} of its ranks do not fill exactly."
                    )


def _entries_to_json(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: {
            "dtype": names[entry.dtype],
            "shape": list(entry.shape),
            "chunks": [
                {"file": c.file, "key": c.key, "offset": list(c.offset), "shape": list(c.shape)}
                for c in entry.chunks
            ],
        }
        for name, entry in entries.items()
    }


def _entries_from_json(value: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            chunks=tuple(
                Chunk(c["file"], c["key"], tuple(c["offset"]), tuple(c["shape"]))
                for c in entry["chunks"]
            ),
        )
        for name, entry in value.items()
    }


@dataclass(kw_only=True)
class Manifest:
    """The file that makes a folder a checkpoint; it is written last.

    Attributes:
        world_size: Number of ranks that wrote.
        layout: Size of every mesh axis.
        step: Optimizer steps that the weights have seen.
        epoch: Epoch of the Trainer.
        versions: Of the packages that wrote it.
        files: Name -> length and checksum of every other file.
    """

    world_size: int
    layout: dict[str, int] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into a folder, with a checksum of its own in the first line."""
        value = {"kind": _KIND, "format": FORMAT, **asdict(self)}
        body = f'"manifest": {json.dumps(value, indent=1)}\n}}\n'.encode()
        with ChecksumFile(folder / MANIFEST) as file:
            file.write(_first_line(body) + body)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and verify the manifest of a folder.

        Raises:
            CheckpointError: It is missing, damaged, or of a newer format.
        """
        try:
            data = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: it has no {MANIFEST}."
            ) from None
        body = data[len(_first_line(b"")) :]
        if data != _first_line(body) + body:
            raise CheckpointError(
                f"{folder}: {MANIFEST} is damaged: its content does not have the checksum in its "
                "first line. Use another checkpoint."
            )
        value = json.loads(data)["manifest"]
        if value.pop("kind") != _KIND or value.pop("format") > FORMAT:
            raise CheckpointError(
                f"{folder}: {MANIFEST} says that a newer version wrote it; this one reads format "
                f"{FORMAT}."
            )
        files = {name: FileRecord(**record) for name, record in value.pop("files").items()}
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{folder}: {MANIFEST} names {outside[0]!r}, a file elsewhere.")
        return cls(**value, files=files)


def _first_line(body: bytes) -> bytes:
    return f'{{"checksum": "crc32:{zlib.crc32(body):08x}",\n'.encode()


def merge_entries(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Put the chunks together that several ranks wrote of every tensor.

    Args:
        parts: What each rank wrote.
    """
    merged: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.items():
            old = merged.get(name)
            chunks = entry.chunks if old is None else old.chunks + entry.chunks
            merged[name] = TensorEntry(entry.dtype, entry.shape, chunks)
    return merged
