"""The two forms of a checkpoint, a folder and one file, as `CheckpointReader` sees them."""

import json
import mmap
import os
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_par.checkpoint.file_system import current_of, Place, UrlPath
from lightning_par.checkpoint.index import (
    Chunk,
    INDEX,
    Index,
    MANIFEST,
    Manifest,
    TensorEntry,
    well_formed,
)
from lightning_par.checkpoint.pieces import unbroken_runs
from lightning_par.checkpoint.plain_file import read_manifest
from lightning_par.checkpoint.progress import advance
from lightning_par.checkpoint.storage import check_regular
from lightning_par.checkpoint.tensor_files import TensorFiles
from lightning_par.errors import CheckpointError

__all__ = ["FileStore", "FolderStore", "Store", "open_store"]

_BLOCK = 1 << 20
"""Bytes that are copied and then summed at a time."""
_REQUEST = 16 << 20
"""Bytes that are asked of a store at a time."""

_CURE = " Use another checkpoint."
"""End of a message, left out of a list of problems."""


class Store(ABC):
    """Where a checkpoint is: verified bytes by name, and tensors.

    Attributes:
        manifest: Verified manifest.
        index: Verified index.
        files: Tensors of the index.
    """

    manifest: Manifest
    index: Index
    files: TensorFiles

    def __init__(self, path: Place) -> None:
        self._path = path

    @abstractmethod
    def _parts(self, name: str) -> Iterator[memoryview]:
        """Give the bytes that the manifest lists under a name; the next ones take the place of
        each.
        """

    def problem(self, name: str) -> str | None:
        """Compare what the manifest lists under a name with its checksum.

        Returns:
            What is wrong with it; None if nothing is.
        """
        written, found = self.manifest.files[name].crc32, 0
        try:
            for part in self._parts(name):
                found = zlib.crc32(part, found)
                advance("verify", len(part))
        # Each as a text: a check of many files lists all that are wrong, and stops at none.
        except FileNotFoundError:
            return f"{name} is missing"
        except CheckpointError as error:
            return error.message.removesuffix(_CURE)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if f"{found:08x}" == written:
            return None
        return f"{name} is damaged: its checksum is {found:08x} instead of {written}"

    def read(self, name: str) -> bytes:
        """Return the bytes of a file or record."""
        return b"".join(bytes(part) for part in self._parts(name))

    def state_tensor(self, file: str, key: str) -> Tensor:
        """Return a tensor that belongs to the state of a rank, in memory of its own."""
        if file not in self.manifest.files:
            raise CheckpointError(
                "LP502",
                f"the checkpoint {self._path} is damaged: it refers to the file {file!r}, which "
                "is missing. Use another checkpoint.",
            )
        # A clone, since a mapped tensor would keep the file open and change with it.
        return self._state_tensor(file, key).clone()

    @abstractmethod
    def _state_tensor(self, file: str, key: str) -> Tensor:
        """Return a tensor of a safetensors file, or of a record of that form."""


class FolderStore(Store):
    """Store of a checkpoint folder.

    Args:
        path: The folder.

    Raises:
        CheckpointError: Manifest or index are missing, damaged or malformed.
    """

    def __init__(self, path: Place) -> None:
        super().__init__(path)
        # The chain of trust: the manifest has its own checksum and those of all files, the index
        # among them.
        self.manifest = Manifest.read(path)
        if INDEX not in self.manifest.files:
            raise CheckpointError(
                "LP502",
                f"the checkpoint {path} is damaged: its {MANIFEST} does not list {INDEX}. Use "
                "another checkpoint.",
            )
        problem = self.problem(INDEX)
        if problem is not None:
            raise CheckpointError(
                "LP502", f"the checkpoint {path} cannot be used: {problem}. Use another checkpoint."
            )
        with well_formed(f"{path}: {INDEX}"):
            self.index = Index.from_json(json.loads(self.read(INDEX)))
        # Nor may an index make us read files elsewhere, or tensors that no file is long enough for.
        room = {name: record.length for name, record in self.manifest.files.items()}
        for _, entry, chunk in self.index.chunks():
            if chunk.file not in room:
                raise CheckpointError(
                    "LP502",
                    f"the checkpoint {path} is damaged: its {INDEX} refers to the file "
                    f"{chunk.file!r}, which is missing. Use another checkpoint.",
                )
            # The boxes of a file have to fit into its length. Else an index
            # could ask for terabytes of memory before the file is looked at.
            room[chunk.file] -= _nbytes(entry, chunk)
            if room[chunk.file] < 0:
                raise CheckpointError(
                    "LP502",
                    f"the checkpoint {path} is damaged: {chunk.file} is shorter than its "
                    f"{INDEX} says. Use another checkpoint.",
                )
        self.files = TensorFiles(path)

    def _parts(self, name: str) -> Iterator[memoryview]:
        path, length = self._path / name, self.manifest.files[name].length
        check_regular(path)
        found = path.size() if isinstance(path, UrlPath) else path.stat().st_size
        if found != length:
            raise CheckpointError(
                "LP502",
                f"the checkpoint file {path} is damaged: it has {found} bytes instead of "
                f"{length}.{_CURE}",
            )
        if isinstance(path, UrlPath):
            for low in range(0, length, _REQUEST):
                yield memoryview(path.read_bytes(low, low + _REQUEST))
            return
        # Through one buffer: a file may be larger than the memory.
        block = memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                yield block[:count]

    def _state_tensor(self, file: str, key: str) -> Tensor:
        return self.files.tensor(file, key)


class FileStore(Store):
    """Store of a checkpoint that is one file.

    Args:
        path: The file.

    Raises:
        CheckpointError: The manifest is missing, damaged or malformed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        while True:
            self._file = _MappedFile(path)
            data = read_manifest(path)
            # A run may have replaced it meanwhile: manifest and tensors have to be of one file.
            if os.path.samestat(self._file.stat(), path.stat()):
                break
        if data is None:
            raise CheckpointError(
                "LP501",
                f"{path} has no manifest, so it is damaged or was not written by lightning_par. "
                "Use a checkpoint of lightning_par.",
            )
        where = f"{path}: {MANIFEST}"
        self.manifest, rest = Manifest.decode(data, where)
        with well_formed(where):
            self.index = Index.from_json(rest["index"])
            self._boxes = {f"{k}/{c.key}": (e, c) for k, e, c in self.index.chunks()}
        self._file.places = self.manifest.places
        # Twice the same object: as `TensorFiles` for readers, and with its bytes for the
        # checksums.
        self.files: TensorFiles = self._file
        self._check_places(self._file.stat().st_size)
        self._state: dict[str, dict[str, Tensor]] = {}

    def _check_places(self, size: int) -> None:
        places, files = self.manifest.places, self.manifest.files
        # The record holds the whole tensor, of which the box is a part, so the whole has to fit.
        for name, (entry, chunk) in self._boxes.items():
            place = places.get(chunk.file, -1)
            end = place + entry.numel * entry.dtype.itemsize
            # A view of bytes as another dtype needs an aligned start (`Tensor.view(dtype)`).
            if place < 0 or place % entry.dtype.itemsize or end > size or name not in files:
                raise CheckpointError(
                    "LP502",
                    f"the checkpoint {self._path} is damaged: its {MANIFEST} gives {name} no "
                    "valid position in the file. Use another checkpoint.",
                )
        for name, record in files.items():
            end = places.get(name, -1) + record.length
            # A record without a place ends before its own length, and fails here.
            if name not in self._boxes and not 0 <= record.length <= end <= size:
                raise CheckpointError(
                    "LP502",
                    f"the checkpoint {self._path} is damaged: its {MANIFEST} gives {name} no "
                    "valid position in the file. Use another checkpoint.",
                )

    def _parts(self, name: str) -> Iterator[memoryview]:
        if name in self._boxes:
            return self._file.box_bytes(*self._boxes[name])
        return self._file.bytes_at(self.manifest.places[name], self.manifest.files[name].length)

    def _state_tensor(self, file: str, key: str) -> Tensor:
        # Parsed once per rank's record; the tensors share its memory.
        if file not in self._state:
            try:
                self._state[file] = safetensors.torch.load(self.read(file))
            except SafetensorError as error:
                raise CheckpointError(
                    "LP502",
                    f"the checkpoint {self._path} is damaged: its part {file} cannot be read "
                    f"({error}). Use another checkpoint.",
                ) from error
        return self._state[file][key]


class _MappedFile(TensorFiles):
    """Whole tensors in one file, which is open, and mapped into memory when it is used.

    Attributes:
        places: Name of a record -> place of its first byte.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path, self.places = path, dict[str, int]()
        self._mapped: Tensor | None = None
        self._descriptor = os.open(path, os.O_RDONLY)
        # Closed with the object: readers have no `close`, and are dropped when the load is over.
        weakref.finalize(self, os.close, self._descriptor)
        self._block = memoryview(bytearray(_BLOCK))

    def stat(self) -> os.stat_result:
        """Return the status of the file that is open, whatever has its path now."""
        return os.fstat(self._descriptor)

    def _chunk(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        # At first use: a reader of the manifest alone maps nothing.
        if self._mapped is None:
            self._mapped = _map_file(self._descriptor)
        place = self.places[chunk.file]
        # Views only: pages are read when the caller copies from them.
        flat = self._mapped[place : place + entry.numel * entry.dtype.itemsize]
        found = flat.view(entry.dtype).view(entry.shape)
        for dim, (low, size) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
            found = found.narrow(dim, low, size)
        return found

    def box_bytes(self, entry: TensorEntry, chunk: Chunk) -> Iterator[memoryview]:
        """Give the bytes of a box, row after row; the next ones take the place of each."""
        size = _nbytes(entry, chunk)
        # Nothing to sum, and no run to begin.
        if not size:
            return
        # By arithmetic: there are many boxes, and views of a tensor take long to make.
        places, run = unbroken_runs(chunk, entry.shape)
        if run * entry.dtype.itemsize == size:
            place = self.places[chunk.file] + next(places) * entry.dtype.itemsize
            yield from self.bytes_at(place, size)
            return
        # A box with gaps: about 1 MiB of rows at a time, made contiguous as its writer summed
        # them.
        box = self._chunk(entry, chunk)
        for part in box.split(max(1, _BLOCK * box.shape[0] // size)):
            yield part.contiguous().view(-1).view(torch.uint8).numpy().data

    def bytes_at(self, place: int, length: int) -> Iterator[memoryview]:
        """Give the bytes of a part of the file; the next ones take the place of each."""
        # Read and not mapped: the kernel reads ahead, and no page of it has to be mapped.
        while length:
            count = os.preadv(self._descriptor, [self._block[:length]], place)
            if not count:
                raise CheckpointError(
                    "LP502",
                    f"{self._path} is shorter than its manifest says, so it is damaged. Use an "
                    "earlier checkpoint.",
                )
            place, length = place + count, length - count
            yield self._block[:count]


def _map_file(descriptor: int) -> Tensor:
    # Not UntypedStorage.from_file, whose mapping may be written to: the system would count all of
    # the file as memory that might be needed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _nbytes(entry: TensorEntry, chunk: Chunk) -> int:
    return torch.Size(chunk.shape).numel() * entry.dtype.itemsize


def open_store(path: Place) -> Store:
    """Return the store of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged or malformed.
    """
    if isinstance(path, Path) and path.is_file():
        return FileStore(path)
    return FolderStore(current_of(path))
