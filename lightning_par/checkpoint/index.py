"""Index and manifest of a checkpoint: which file holds which slice of which tensor, and checksums.

A checkpoint is one file, see `plain_file`, or a folder::

    manifest.json                            step, mesh sizes; length and checksum of every file
    index.json                               global name -> dtype, global shape, slices
    weights-00001-of-00004.safetensors       what rank 1 wrote of the weights
    optimizer-00001-of-00004.safetensors     and of the optimizer states
    state-00000-of-00004.json, .safetensors  loops, callbacks, schedulers, random generators

Names and shapes are those of one process; nothing in the index knows a mesh.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_par.checkpoint.file_system import Place
from lightning_par.checkpoint.storage import check_regular, ChecksumFile, DTYPES, FileRecord
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
    "merge_entries",
    "well_formed",
]

FORMAT = 1
"""Version of the format; it grows when older code can no longer read new checkpoints."""
MANIFEST, INDEX = "manifest.json", "index.json"
_KIND = "lightning_par checkpoint"


def file_name(kind: str, rank: int, world: int, suffix: str = "safetensors") -> str:
    """Return the name of a file that one rank writes.

    Args:
        kind: ``"weights"``, ``"optimizer"`` or ``"state"``.
        rank: Global rank that writes it.
        world: Number of ranks.
        suffix: Suffix of the name, without the dot.
    """
    return f"{kind}-{rank:05d}-of-{world:05d}.{suffix}"


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Context around the reading of a file that anyone may have written.

    Args:
        what: Path and name of the file, for the message.

    Raises:
        CheckpointError: In place of whatever a value of another type, a missing key, or nesting
            without end makes Python raise.
    """
    try:
        yield
    except CheckpointError:
        # Says already what is wrong; only what Python or torch say needs the name of the file.
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # of torch; also RecursionError, of which Python says too much
        cause = str(error).partition("\n")[0]
    else:
        return
    # Outside of the handlers, so that the traceback does not show an error of our parsing.
    raise CheckpointError(
        "LP502", f"{what} has no valid content ({cause}). Use another checkpoint."
    )


@dataclass(frozen=True)
class Chunk:
    """A box (slice in every dim) of a global tensor, stored in a file.

    Attributes:
        file: Name of the file inside the checkpoint; of one file, of the record in it that holds
            the whole tensor.
        key: Name of the box, in that safetensors file.
        offset: First entry of the box in every dim of the global tensor.
        shape: Shape of the box.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Where a global tensor is stored.

    Attributes:
        dtype: Dtype of all its chunks.
        shape: Global shape.
        chunks: Boxes that do not overlap and together fill the global shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of entries of the global tensor."""
        return torch.Size(self.shape).numel()

    def is_complete(self) -> bool:
        """Return whether the chunks have as many entries as the global tensor."""
        # Counting finds a box that is missing or stored twice. Only both at once, with boxes of
        # equal size, would pass, and no single fault of a save does that.
        return sum(torch.Size(chunk.shape).numel() for chunk in self.chunks) == self.numel


@dataclass(kw_only=True)
class Index:
    """Contents of a checkpoint by global name.

    Attributes:
        weights: FQN of a weight -> where it is stored; a tied weight is listed once.
        aliases: Further FQNs of tied weights -> the name in `weights`.
        optimizer: ``"0/<weight>/exp_avg"`` (index of the optimizer, FQN, state) -> where it is
            stored.
        groups: Per optimizer its parameter groups: encoded options, and FQNs under ``"params"``.
        values: Entries of the state dicts that are no tensors, encoded; named ``"weights/<name>"``
            or ``"optimizer/0/<weight>/<state>"``.
    """

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, TensorEntry] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON types; `from_json` is the inverse."""
        return {
            "weights": _entries_to_json(self.weights),
            "aliases": self.aliases,
            "optimizer": _entries_to_json(self.optimizer),
            "groups": self.groups,
            "values": self.values,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Index":
        """Return the index of the JSON types that `to_json` returned; see `well_formed`.

        Raises:
            CheckpointError: An entry does not fit the others.
        """
        index = cls(
            weights=_entries_from_json(value["weights"]),
            aliases={str(name): str(of) for name, of in value["aliases"].items()},
            optimizer=_entries_from_json(value["optimizer"]),
            groups=[[dict(group) for group in groups] for groups in value["groups"]],
            values=dict(value["values"]),
        )
        # Before anything is loaded: a load that finds a hole would leave tensors half written.
        index.check_complete()
        unknown = [name for name, of in index.aliases.items() if of not in index.weights]
        if unknown:
            raise CheckpointError(
                "LP502",
                f"the index of the checkpoint is damaged: it lists {unknown[0]!r} as a tied "
                "weight, but not the weight to which it is tied. Use another checkpoint.",
            )
        return index

    @property
    def kinds(self) -> dict[str, dict[str, TensorEntry]]:
        """Weights and optimizer states by the name of their kind."""
        return {"weights": self.weights, "optimizer": self.optimizer}

    def chunks(self) -> Iterator[tuple[str, TensorEntry, Chunk]]:
        """Give every stored box with its kind, ``weights`` or ``optimizer``, and its tensor."""
        for kind, entries in self.kinds.items():
            for entry in entries.values():
                yield from ((kind, entry, chunk) for chunk in entry.chunks)

    def check_complete(self) -> None:
        """Check that the chunks of every tensor fill its global shape.

        Raises:
            CheckpointError: A part of a tensor is missing or stored twice; names the first one.
        """
        for kind, entries in self.kinds.items():
            for name, entry in entries.items():
                if not entry.is_complete():
                    boxes = [(c.offset, c.shape) for c in entry.chunks]
                    raise CheckpointError(
                        "LP502",
                        f"the index of the checkpoint is damaged: the stored parts of {name} "
                        f"({kind}) do not fill its shape {entry.shape} exactly once. The offset "
                        f"and the shape of each part are {boxes}. Use another checkpoint.",
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
    found = {}
    for name, entry in value.items():
        shape = _sizes(entry["shape"])
        chunks = []
        for c in entry["chunks"]:
            chunk = Chunk(str(c["file"]), str(c["key"]), _sizes(c["offset"]), _sizes(c["shape"]))
            # Not only complete but inside: `narrow` with numbers from a file must not reach
            # beyond.
            boxes = zip(chunk.offset, chunk.shape, shape, strict=True)
            if any(low + size > whole for low, size, whole in boxes):
                raise CheckpointError(
                    "LP502",
                    f"the index of the checkpoint is damaged: a part of {name} is outside of "
                    f"its shape {shape}. Use another checkpoint.",
                )
            chunks.append(chunk)
        found[name] = TensorEntry(DTYPES[entry["dtype"]], shape, tuple(chunks))
    return found


def _sizes(value: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(value)
    # Not isinstance: `true` of JSON is an int in Python, and a size of 1 nobody meant.
    if any(type(size) is not int or size < 0 for size in sizes):
        raise CheckpointError(
            "LP502",
            f"the index of the checkpoint is damaged: {sizes} is not a shape. Use another "
            "checkpoint.",
        )
    return sizes


@dataclass(kw_only=True)
class Manifest:
    """Manifest of a checkpoint. It is written last: a checkpoint without one is incomplete.

    Attributes:
        world_size: Number of ranks that wrote the checkpoint.
        layout: Mesh axis -> size; informative, loading does not need it.
        step: Number of optimizer steps of the weights.
        epoch: Epoch of the Trainer.
        versions: Package -> version, for the packages that wrote the checkpoint.
        files: Name -> length and checksum of every other file; of one file, of its records and of
            the boxes of its tensors (``weights/<key of the box>``).
        places: Of one file: record -> its first byte.
    """

    world_size: int
    layout: dict[str, int] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def encode(self, **more: Any) -> bytes:
        """Return the manifest as text, with its own checksum in the first line.

        Args:
            more: Further entries, of JSON types.
        """
        own: dict[str, Any] = {**vars(self), "files": {n: vars(r) for n, r in self.files.items()}}
        value = {"kind": _KIND, "format": FORMAT, **own, **more}
        # A folder has none; without the key it is what older code of this format reads.
        if not self.places:
            del value["places"]
        # Python's fast encoder does not indent; a folder's manifest is short, and read by people.
        text = json.dumps(value, indent=None if more else 1, allow_nan=False)
        # No other file could hold its checksum. With the first line the whole is one JSON object.
        body = f'"manifest": {text}\n}}\n'.encode()
        return _first_line(body) + body

    @classmethod
    def decode(cls, data: bytes, where: str) -> tuple["Manifest", dict[str, Any]]:
        """Verify and read what `encode` wrote; return the further entries, too.

        Args:
            data: The text.
            where: Path and name of its file, for messages.

        Raises:
            CheckpointError: It is damaged, malformed or of a newer format.
        """
        # The first line has the same length whatever the body is: 8 hexadecimal digits.
        body = data[len(_first_line(b"")) :]
        if data != _first_line(body) + body:
            raise CheckpointError(
                "LP502",
                f"{where} is damaged: its content does not match the checksum in its first line. "
                "Use another checkpoint.",
            )
        with well_formed(where):
            value = json.loads(data)["manifest"]
            # Before the rest is read: a newer format may have other types in the same places.
            if value.pop("kind") != _KIND or int(value.pop("format")) > FORMAT:
                raise CheckpointError(
                    "LP503",
                    f"{where} was written by a newer version of lightning_par; the installed "
                    f"version reads checkpoints up to format {FORMAT}. Install a newer "
                    "lightning_par.",
                )
            files = {
                str(name): FileRecord(int(record["length"]), str(record["crc32"]))
                for name, record in value.pop("files").items()
            }
            manifest = cls(
                world_size=int(value.pop("world_size")),
                layout={str(k): int(v) for k, v in value.pop("layout").items()},
                step=int(value.pop("step")),
                epoch=int(value.pop("epoch")),
                versions={str(k): str(v) for k, v in value.pop("versions").items()},
                files=files,
                places={str(k): int(v) for k, v in value.pop("places", {}).items()},
            )
            return manifest, value

    def write(self, folder: Place) -> None:
        """Write the manifest into a folder."""
        with ChecksumFile(folder / MANIFEST) as file:
            file.write(self.encode())

    @classmethod
    def read(cls, folder: Place) -> "Manifest":
        """Read and verify the manifest of a folder.

        Raises:
            CheckpointError: The manifest is missing, damaged, malformed, of a newer format, or
                names a file outside the folder.
        """
        try:
            check_regular(folder / MANIFEST)
            data = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                "LP501",
                f"{folder} is not a complete checkpoint: it has no {MANIFEST}, the file that a "
                "save writes last. Give the path of a complete checkpoint. lightning-par inspect "
                "PATH tells whether a checkpoint is complete.",
            ) from None
        manifest, _ = cls.decode(data, f"{folder}: {MANIFEST}")
        # A manifest from elsewhere must not make us read (or compare) "../../etc/passwd".
        outside = [name for name in manifest.files if Path(name).name != name]
        if outside:
            raise CheckpointError(
                "LP502",
                f"{folder}: {MANIFEST} lists {outside[0]!r}, a file outside of the checkpoint "
                "folder. Use another checkpoint.",
            )
        return manifest


def _first_line(body: bytes) -> bytes:
    return f'{{"checksum": "crc32:{zlib.crc32(body):08x}",\n'.encode()


def merge_entries(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the entries of several ranks: the chunks of a tensor are concatenated.

    Args:
        parts: Name -> entry with the chunks that one rank wrote, for every rank.
    """
    merged: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.items():
            # Dtype and shape are global and so alike on all ranks; boxes are each rank's own.
            old = merged.get(name)
            chunks = entry.chunks if old is None else old.chunks + entry.chunks
            merged[name] = TensorEntry(entry.dtype, entry.shape, chunks)
    return merged
