"""Checkpoint reader: any box of a global tensor, from whichever files hold parts of it."""

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

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Parts of the state that the Trainer never restores, so that pickles in them can be left out."""


def overlap(
    chunk: Chunk, offset: Sequence[int], shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return the intersection of a stored box and a wanted box.

    Args:
        chunk: Stored box.
        offset: First entry of the wanted box in every dim.
        shape: Shape of the wanted box.

    Returns:
        First and one-past-last global entry in every dim; None if the boxes do not overlap.
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
    """Safetensors files of a folder, memory-mapped at their first use.

    Args:
        folder: Folder of the files.

    Attributes:
        bytes_read: Bytes of tensors copied out of the files so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self.bytes_read = 0

    def tensor(self, file: str, key: str) -> Tensor:
        """Return a memory-mapped tensor; its pages are read when they are accessed.

        Args:
            file: Name of the file in the folder.
            key: Name of the tensor in the file.

        Raises:
            CheckpointError: The file is missing, not a safetensors file, or has no such tensor.
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
        """Read a box of a global tensor from the chunks that overlap it.

        Args:
            entry: Index entry of the tensor.
            offset: First entry of the box in every dim.
            out: Receives the box; has its shape, any dtype and any device.

        Raises:
            CheckpointError: A file has not the tensors that the index says.
        """
        # Only the pages of the intersections are read: a mapped tensor is narrowed before the copy.
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
        if chunk.shape == (1, *found.shape):
            # One of several tensors that the index stacks, e.g. experts in files of Hugging Face.
            found = found[None]
        if tuple(found.shape) != chunk.shape:
            raise CheckpointError(
                f"{self._folder / chunk.file}: {chunk.key} has the shape {tuple(found.shape)}, "
                f"the index says {chunk.shape}."
            )
        return found

    def read_whole(self, entry: TensorEntry) -> Tensor:
        """Read the global tensor of an index entry, onto the CPU."""
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_box(entry, [0] * len(entry.shape), out)
        return out


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A global tensor in files, of which any box can be read.

    Attributes:
        files: Files that hold its chunks.
        entry: Its entry in the index.
    """

    files: TensorFiles
    entry: TensorEntry

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in the files."""
        return self.entry.dtype

    def read_box(self, offset: Sequence[int], out: Tensor) -> None:
        """Read a box into `out`; see `TensorFiles.read_box`."""
        self.files.read_box(self.entry, offset, out)

    def read(self) -> Tensor:
        """Read the global tensor, onto the CPU."""
        return self.files.read_whole(self.entry)


class StoredTensors(MutableMapping[str, Any]):
    """State dict whose tensors stay in files until they are accessed.

    ``states[name]`` reads the global tensor; `find` returns it unread, for a rank that needs only
    its shard. Entries may be replaced or removed.

    Args:
        files: Files that hold the chunks.
        entries: FQN -> index entry.
        aliases: Further FQNs of tied weights -> FQN in `entries`.
        values: Entries of the state dict that are no tensors.
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
        """Return an entry without reading it: a tensor in files is a `StoredTensor`.

        Args:
            name: FQN of the entry.

        Raises:
            KeyError: There is no such entry.
        """
        return self._entries[name]

    def renamed(self, prefix: str) -> "StoredTensors":
        """Return the same entries with `prefix` before every name."""
        return self.with_entries({f"{prefix}{name}": e for name, e in self._entries.items()})

    def with_entries(self, entries: Mapping[str, Any]) -> "StoredTensors":
        """Return a mapping with other entries.

        Args:
            entries: FQN -> `StoredTensor`, or a value that is no tensor in files.
        """
        copy = StoredTensors.__new__(StoredTensors)  # __init__ takes entries of an index
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
        return name in self._entries  # Mapping's own calls __getitem__, which reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, eq=False)
class StoredOptimizer:
    """State of one optimizer in a checkpoint.

    Attributes:
        groups: Parameter groups: their options, and FQNs under ``"params"``.
        states: FQN of a parameter -> name of a state -> its value; tensors as `StoredTensor`.
    """

    groups: list[dict[str, Any]]
    states: Mapping[str, Mapping[str, Any]]


class CheckpointReader:
    """Reader of a checkpoint folder; manifest and index are verified at once, other files not.

    Args:
        folder: Checkpoint folder.

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
        """Compare files with their checksums.

        Args:
            names: Names of files that the manifest lists.

        Returns:
            One message per missing or damaged file.
        """
        found = (check_file(self.folder / name, self.manifest.files[name]) for name in names)
        return [problem for problem in found if problem is not None]

    def weights(self, *, unpickle: bool = False) -> StoredTensors:
        """Return the weights as a lazy state dict.

        Args:
            unpickle: Whether pickles may be loaded, which can run code.

        Raises:
            PickledValueError: An entry is a pickle, and `unpickle` is false.
        """
        values = self._values("weights/", unpickle=unpickle)
        return StoredTensors(self.files, self.index.weights, self.index.aliases, values)

    def optimizers(self, *, unpickle: bool = False) -> list[StoredOptimizer]:
        """Return the optimizers, their tensors unread.

        Args:
            unpickle: Whether pickles may be loaded, which can run code.

        Raises:
            PickledValueError: An entry is a pickle, and `unpickle` is false.
        """
        decoder = self._decoder(unpickle=unpickle)
        found = []
        for number, groups in enumerate(self.index.groups):
            states: dict[str, dict[str, Any]] = {}
            prefix = f"{number}/"
            for key, entry in self.index.optimizer.items():
                if key.startswith(prefix):
                    # From the right: an FQN may hold a "/", the name of a state does not.
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
            rank: Rank that wrote it. Rank 0 stored the Trainer's state, the others only their own
                part, such as random states.
            unpickle: Whether pickles may be loaded, which can run code.

        Returns:
            The state by the Trainer's keys. If `unpickle` is false, pickled hyper-parameters are
            left out, and their names listed under ``"left_out"``.

        Raises:
            CheckpointError: A file is damaged, or anything else is a pickle and `unpickle` is
                false.
        """
        world = self.manifest.world_size
        encoded = self._read_json(file_name("state", rank, world, "json"))
        with_tensors = file_name("state", rank, world)
        if with_tensors in self.manifest.files:
            self._verify(with_tensors)
        decoder = self._decoder(unpickle=unpickle)
        left_out: list[str] = []
        for part in _HYPER_PARAMETERS:
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
        # A clone, since a mapped tensor would keep the file open and change with it.
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
    """Verify every file of a checkpoint.

    Args:
        folder: Checkpoint folder.

    Returns:
        One message per missing or damaged file; empty if the checkpoint is intact.
    """
    try:
        reader = CheckpointReader(folder)
    except CheckpointError as error:
        return [str(error)]
    return reader.problems(sorted(reader.manifest.files))
