"""Tensors that stay in files until they are used: any box of a global tensor, from whichever files
hold parts of it.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from safetensors import safe_open, SafetensorError
from torch import Tensor

from lightning_par.checkpoint.file_system import Place, UrlPath
from lightning_par.checkpoint.index import Chunk, TensorEntry, well_formed
from lightning_par.checkpoint.progress import advance
from lightning_par.checkpoint.storage import check_regular, DTYPES
from lightning_par.errors import CheckpointError

__all__ = [
    "StoredTensor",
    "StoredTensors",
    "TensorFiles",
    "overlap",
]


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
    # A tensor without dims has one entry in one box: the empty list, which is not None.
    for dim, size in enumerate(shape):
        low = max(offset[dim], chunk.offset[dim])
        high = min(offset[dim] + size, chunk.offset[dim] + chunk.shape[dim])
        if high <= low:
            return None
        common.append((low, high))
    return common


_BLOCK = 4 << 20
"""Bytes of a request to a store for less than that: small tensors lie one behind the other."""


class _StoreFile:
    """A safetensors file behind a URL, of which ranges are loaded; else as `safe_open` gives it.

    Args:
        path: The file.
        load: Gives a range of bytes of a file, and remembers some.

    Raises:
        CheckpointError: It is no such file.
    """

    def __init__(self, path: UrlPath, load: Callable[[UrlPath, int, int], bytes]) -> None:
        self._path, self._load_range = path, load
        with well_formed(str(path)):
            self._start = 8 + int.from_bytes(self._load(0, 8), "little")
            self._header = dict(json.loads(self._load(8, self._start)))

    def get_tensor(self, key: str) -> Tensor:
        """Load a tensor."""
        with well_formed(f"{self._path}: {key}"):
            entry = self._header[key]
            return self._values(entry, entry["shape"], *entry["data_offsets"])

    def get_rows(self, box: Chunk, first: int, end: int) -> Tensor:
        """Load the rows of a stored box from `first` up to `end`."""
        with well_formed(f"{self._path}: {box.key}"):
            entry = self._header[box.key]
            if tuple(entry["shape"]) != box.shape:
                raise ValueError(
                    f"{entry['shape']} is not the shape {list(box.shape)} of the index"
                )
            low, high = entry["data_offsets"]
            row = (high - low) // max(1, box.shape[0])
            shape = [end - first, *box.shape[1:]]
            return self._values(entry, shape, low + first * row, low + end * row)

    def _values(self, entry: dict[str, Any], shape: Sequence[int], low: int, end: int) -> Tensor:
        data, dtype = bytearray(self._load(self._start + low, self._start + end)), entry["dtype"]
        # `frombuffer` takes no empty buffer.
        found = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        return found.view(DTYPES[dtype]).view(tuple(shape))

    def _load(self, low: int, end: int) -> bytes:
        # A store refuses to give nothing of the end of a file.
        if low == end:
            return b""
        if end - low >= _BLOCK:
            return self._path.read_bytes(low, end)
        first = low // _BLOCK
        places = range(first * _BLOCK, end, _BLOCK)
        found = [self._load_range(self._path, place, place + _BLOCK) for place in places]
        return b"".join(found)[low - first * _BLOCK : end - first * _BLOCK]


class TensorFiles:
    """Safetensors files of a folder, memory-mapped at their first use; of a URL, loaded in ranges.

    Args:
        folder: Folder of the files.
        follows_links: Whether a file may be a link, as in the cache of Hugging Face.

    Attributes:
        bytes_read: Bytes of tensors copied out of the files so far.
    """

    def __init__(self, folder: Place, *, follows_links: bool = False) -> None:
        self._folder, self._follows_links = folder, follows_links
        self._open: dict[str, Any] = {}
        self._load = functools.lru_cache(16)(UrlPath.read_bytes)
        self.bytes_read = 0

    # What `safe_open` returns cannot be copied.
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the open files, which nobody changes: a callback may copy a loaded checkpoint."""
        return self

    def tensor(self, file: str, key: str) -> Tensor:
        """Return a memory-mapped tensor; its pages are read when they are accessed.

        Args:
            file: Name of the file in the folder.
            key: Name of the tensor in the file.

        Raises:
            CheckpointError: The file is missing, not a regular one, not a safetensors file, or has
                no such tensor.
        """
        found: Tensor = self._read(file, lambda opened: opened.get_tensor(key))
        return found

    def _read(self, file: str, read: Callable[[Any], Any]) -> Any:
        path = self._folder / file
        try:
            # Opened once: parsing a header with thousands of names takes longer than a tensor.
            if file not in self._open:
                if not self._follows_links:
                    check_regular(path)
                self._open[file] = (
                    _StoreFile(path, self._load)
                    if isinstance(path, UrlPath)
                    else safe_open(path, framework="pt", device="cpu")
                )
            return read(self._open[file])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                "LP502", f"{path} cannot be read ({error}). Use another checkpoint."
            ) from error

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
        # Any chunks may overlap the wanted box: they were cut by the mesh that saved.
        for chunk in entry.chunks:
            common = overlap(chunk, offset, out.shape)
            if common is None:
                continue
            source, target = self._rows(entry, chunk, common), out
            for dim, (low, high) in enumerate(common):
                if dim:
                    source = source.narrow(dim, low - chunk.offset[dim], high - low)
                target = target.narrow(dim, low - offset[dim], high - low)
            # Casts and moves to the device on the way: dtypes of the file and of the run may
            # differ.
            target.copy_(source)
            self.bytes_read += source.nbytes
            advance("read", source.nbytes)

    def _rows(self, entry: TensorEntry, chunk: Chunk, common: Sequence[tuple[int, int]]) -> Tensor:
        """Return a stored box in those rows that are wanted, all of each."""
        if not common:
            return self._chunk(entry, chunk)
        first, end = (place - chunk.offset[0] for place in common[0])
        # Of a mapped file only those pages are read anyway.
        if not isinstance(self._folder, UrlPath):
            return self._chunk(entry, chunk).narrow(0, first, end - first)
        found: Tensor = self._read(chunk.file, lambda opened: opened.get_rows(chunk, first, end))
        return found

    def _chunk(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        found = self.tensor(chunk.file, chunk.key)
        # Checked before the shape is compared: the index was made from names, not from files.
        if chunk.shape == (1, *found.shape):
            # One of several tensors that the index stacks, e.g. experts in files of Hugging Face.
            found = found[None]
        if tuple(found.shape) != chunk.shape:
            raise CheckpointError(
                "LP502",
                f"{self._folder / chunk.file} is damaged: {chunk.key} has the shape "
                f"{tuple(found.shape)}, but the index of the checkpoint says {chunk.shape}. Use "
                "another checkpoint.",
            )
        return found


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

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.entry.numel * self.entry.dtype.itemsize

    def read_box(self, offset: Sequence[int], out: Tensor) -> None:
        """Read a box into `out`; see `TensorFiles.read_box`."""
        self.files.read_box(self.entry, offset, out)

    def read(self) -> Tensor:
        """Read the global tensor, onto the CPU."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_box([0] * out.ndim, out)
        return out


class StoredTensors(MutableMapping[str, Any]):
    """State dict whose tensors stay in files until they are accessed.

    ``states[name]`` reads the global tensor and keeps it, so that what a hook writes into it is
    loaded; `find` returns it unread, for a rank that needs only its shard. Entries may be replaced
    or removed.

    Args:
        entries: FQN -> `StoredTensor`, or a value that is no tensor in files.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries: dict[str, Any] = dict(entries)

    @classmethod
    def of_files(
        cls,
        files: TensorFiles,
        entries: Mapping[str, TensorEntry],
        aliases: Mapping[str, str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the state dict that an index describes.

        Args:
            files: Files that hold the chunks.
            entries: FQN -> index entry.
            aliases: Further FQNs of tied weights -> FQN in `entries`.
            values: Entries of the state dict that are no tensors.
        """
        # Each name has its own `StoredTensor`: a hook that replaces one tied entry leaves the
        # other.
        more = {name: entries[of] for name, of in (aliases or {}).items()}
        found = {name: StoredTensor(files, entry) for name, entry in {**entries, **more}.items()}
        return cls({**found, **(values or {})})

    def copy(self) -> "StoredTensors":
        """Return a shallow copy, as of a dict; nothing is read."""
        return StoredTensors(self._entries)

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> "StoredTensors":
        """Return a copy with the entries of another mapping added, as of dicts."""
        merged = self.copy()
        merged.update(other)
        return merged

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
        return StoredTensors({f"{prefix}{name}": e for name, e in self._entries.items()})

    def unread(self) -> dict[str, Any]:
        """Return all entries as `find` gives them."""
        return dict(self._entries)

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        # Kept, as the docstring promises: a hook may write into what it got. It costs the memory
        # of the whole tensor, on this rank.
        if isinstance(entry, StoredTensor):
            entry = self._entries[name] = entry.read()
        return entry

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
