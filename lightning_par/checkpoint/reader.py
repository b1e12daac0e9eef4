"""Reading a checkpoint: any box of any tensor, out of whichever files hold parts of it."""

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open, SafetensorError
from torch import Tensor

from lightning_par.checkpoint.index import (
    Chunk,
    file_name,
    INDEX,
    Index,
    MANIFEST,
    Manifest,
    TensorEntry,
)
from lightning_par.checkpoint.json_encoding import Decoder, PickledValueError
from lightning_par.checkpoint.storage import check_file
from lightning_par.errors import CheckpointError

__all__ = [
    "CheckpointReader",
    "StoredOptimizer",
    "StoredTensor",
    "StoredTensors",
    "TensorFiles",
    "find_problems",
    "overlap",
]

_HINTS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Parts of the state that the Trainer never restores; a pickle in them can be left out."""


def overlap(
    chunk: Chunk, offset: Sequence[int], shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return what a stored box and a wanted one have in common: first and one-past-last entry of
    every dim, or None.

    Args:
        chunk: What is stored.
        offset: First entry of the wanted box in every dim.
        shape: Of the wanted box.
    """
    common = []
    for dim, size in enumerate(shape):
        low = max(offset[dim], chunk.offset[dim])
        high = min(offset[dim] + size, chunk.offset[dim] + chunk.shape[dim])
        if high <= low:
            return None
        common.append((low, high))
    return common


class TensorFiles:
    """The safetensors files of a folder, mapped into memory when they are first used.

    Args:
        folder: Where they are.

    Attributes:
        bytes_read: Bytes of tensors that have been copied out of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self.bytes_read = 0

    def tensor(self, file: str, key: str) -> Tensor:
        """Return a tensor of a file without reading it: its pages come when they are used.

        Raises:
            CheckpointError: The file is no safetensors file, or has no such tensor.
        """
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            found: Tensor = self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / file}: {error}") from error
        return found

    @torch.no_grad()
    def read_box(self, entry: TensorEntry, offset: Sequence[int], out: Tensor) -> None:
        """Copy a box of a tensor out of the chunks that it overlaps.

        Args:
            entry: Where the tensor is.
            offset: First entry of the box in every dim.
            out: Receives the box; of its shape, of any dtype and device.

        Raises:
            CheckpointError: The files do not fit the index.
        """
        for chunk in entry.chunks:
            common = overlap(chunk, offset, out.shape)
            if common is None:
                continue
            source, target = self._chunk(chunk), out
            for dim, (low, high) in enumerate(common):
                source = source.narrow(dim, low - chunk.offset[dim], high - low)
                target = target.narrow(dim, low - offset[dim], high - low)
            target.copy_(source)
            self.bytes_read += source.numel() * source.element_size()

    def _chunk(self, chunk: Chunk) -> Tensor:
        found = self.tensor(chunk.file, chunk.key)
        if chunk.shape == (1, *found.shape):  # one of several that are stacked
            found = found[None]
        if tuple(found.shape) != chunk.shape:
            raise CheckpointError(
                f"{self._folder / chunk.file}: {chunk.key} has the shape {tuple(found.shape)}, "
                f"the index says {chunk.shape}."
            )
        return found

    def read_whole(self, entry: TensorEntry) -> Tensor:
        """Return a whole tensor, on the CPU."""
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_box(entry, [0] * len(entry.shape), out)
        return out


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in files, of which any box can be read.

    Attributes:
        files: Where it is.
        entry: What the index says of it.
    """

    files: TensorFiles
    entry: TensorEntry

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """As it was written."""
        return self.entry.dtype

    def read_box(self, offset: Sequence[int], out: Tensor) -> None:
        """Copy a box; see `TensorFiles.read_box`."""
        self.files.read_box(self.entry, offset, out)

    def read(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self.files.read_whole(self.entry)


class StoredTensors(MutableMapping[str, Any]):
    """Tensors in files that look like a state dict; one is read when it is asked for.

    A part of the model reads only its part of them (`find`). Entries may be replaced or removed.

    Args:
        files: Where they are.
        entries: Name -> where.
        aliases: Further names.
        values: Entries that are no tensors.
    """

    def __init__(
        self,
        files: TensorFiles,
        entries: Mapping[str, TensorEntry],
        aliases: Mapping[str, str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        more = {name: entries[of] for name, of in (aliases or {}).items()}
        found = {name: StoredTensor(files, entry) for name, entry in {**entries, **more}.items()}
        self._entries: dict[str, Any] = {**found, **(values or {})}

    def find(self, name: str) -> Any:
        """Return an entry; a tensor in a file as a `StoredTensor`, unread."""
        return self._entries[name]

    def renamed(self, prefix: str) -> "StoredTensors":
        """Return the same entries with `prefix` before every name."""
        return self.with_entries({f"{prefix}{name}": e for name, e in self._entries.items()})

    def with_entries(self, entries: Mapping[str, Any]) -> "StoredTensors":
        """Return others like this one.

        Args:
            entries: Name -> `StoredTensor`, or what is no tensor.
        """
        copy = StoredTensors.__new__(StoredTensors)
        copy._entries = dict(entries)
        return copy

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        return entry.read() if isinstance(entry, StoredTensor) else entry

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # that of a mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, eq=False)
class StoredOptimizer:
    """The state of one optimizer in the files of a checkpoint.

    Attributes:
        groups: Options of every group, and under ``"params"`` the names of its parameters.
        states: Name of a parameter -> its states; tensors as `StoredTensor`.
    """

    groups: list[dict[str, Any]]
    states: Mapping[str, Mapping[str, Any]]


class CheckpointReader:
    """A checkpoint whose manifest and index have been verified.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: Manifest or index are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.index = Index.from_json(self._read_json(INDEX))
        self.files = TensorFiles(folder)

    def data_files(self, *kinds: str) -> list[str]:
        """Return the names of the files of these kinds: ``weights``, ``optimizer``, ``state``."""
        return [name for name in self.manifest.files if name.startswith(kinds)]

    def problems(self, names: Iterable[str]) -> list[str]:
        """Read files whole and return what is wrong with them.

        Args:
            names: Of the manifest.
        """
        found = (check_file(self.folder / name, self.manifest.files[name]) for name in names)
        return [problem for problem in found if problem is not None]

    def weights(self, *, unpickle: bool = False) -> StoredTensors:
        """Return the weights, to be read when they are needed."""
        values = self._values("weights/", unpickle=unpickle)
        return StoredTensors(self.files, self.index.weights, self.index.aliases, values)

    def optimizers(self, *, unpickle: bool = False) -> list[StoredOptimizer]:
        """Return the optimizers; their tensors are to be read when they are needed."""
        decoder = self._decoder(unpickle=unpickle)
        found = []
        for number, groups in enumerate(self.index.groups):
            states: dict[str, dict[str, Any]] = {}
            prefix = f"{number}/"
            for key, entry in self.index.optimizer.items():
                if key.startswith(prefix):
                    name, _, state = key.removeprefix(prefix).rpartition("/")
                    states.setdefault(name, {})[state] = StoredTensor(self.files, entry)
            for key, value in self._values(f"optimizer/{prefix}", unpickle=unpickle).items():
                name, _, state = key.rpartition("/")
                states.setdefault(name, {})[state] = value
            options = [decoder.decode(group, "param_groups") for group in groups]
            found.append(StoredOptimizer(options, states))
        return found

    def _values(self, prefix: str, *, unpickle: bool) -> dict[str, Any]:
        decoder = self._decoder(unpickle=unpickle)
        return {
            key.removeprefix(prefix): decoder.decode(value, key)
            for key, value in self.index.values.items()
            if key.startswith(prefix)
        }

    def state(self, rank: int, *, unpickle: bool = False) -> dict[str, Any]:
        """Return what one rank stored besides weights and optimizer states.

        Args:
            rank: 0 stored what belongs to all; the others what is their own.
            unpickle: Whether the user trusts the checkpoint.

        Returns:
            The state; hyper-parameters that were stored as a pickle are left out if it is not
            trusted, and named under ``"left_out"``.

        Raises:
            CheckpointError: A file is damaged, or needs to be trusted.
        """
        world = self.manifest.world_size
        encoded = self._read_json(file_name("state", rank, world, "json"))
        with_tensors = file_name("state", rank, world)
        if with_tensors in self.manifest.files:
            self._verify(with_tensors)
        decoder = self._decoder(unpickle=unpickle)
        left_out: list[str] = []
        for part in _HINTS:
            given = encoded.get(part)
            if isinstance(given, dict) and "$" not in given:
                encoded[part] = {}
                for name, value in given.items():
                    try:
                        decoder.decode(value, f"{part}.{name}")
                        encoded[part][name] = value
                    except PickledValueError:
                        left_out.append(f"{part}.{name}")
        state: dict[str, Any] = decoder.decode(encoded, "state")
        return {**state, "left_out": left_out} if left_out else state

    def _decoder(self, *, unpickle: bool) -> Decoder:
        fetch = lambda file, key: self.files.tensor(file, key).clone()  # noqa: E731
        return Decoder(fetch, unpickle=unpickle)

    def _verify(self, name: str) -> None:
        problems = self.problems([name])
        if problems:
            raise CheckpointError(f"{self.folder}: {problems[0]}. Use another checkpoint.")

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.folder}: {MANIFEST} does not name {name}.")
        self._verify(name)
        try:
            value: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {name} is not JSON: {error}.") from error
        return value


def find_problems(folder: Path) -> list[str]:
    """Read every file of a checkpoint and return what is wrong; nothing if it is sound.

    Args:
        folder: The checkpoint.
    """
    try:
        reader = CheckpointReader(folder)
    except CheckpointError as error:
        return [str(error)]
    return reader.problems(sorted(reader.manifest.files))
