"""Tensors that stay in files until they are used: any box of a global tensor, from whichever files
hold parts of it.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open, SafetensorError
from torch import Tensor

from lightning_par.checkpoint.index import Chunk, TensorEntry
from lightning_par.checkpoint.progress import advance
from lightning_par.checkpoint.storage import check_regular
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


class TensorFiles:
    """Safetensors files of a folder, memory-mapped at their first use.

    Args:
        folder: Folder of the files.
        follows_links: Whether a file may be a link, as in the cache of Hugging Face.

    Attributes:
        bytes_read: Bytes of tensors copied out of the files so far.
    """

    def __init__(self, folder: Path, *, follows_links: bool = False) -> None:
        self._folder, self._follows_links = folder, follows_links
        self._open: dict[str, Any] = {}
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
        try:
            # Opened once: parsing a header with thousands of names takes longer than a tensor.
            if file not in self._open:
                if not self._follows_links:
                    check_regular(self._folder / file)
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            found: Tensor = self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                "LP502",
                f"{self._folder / file} cannot be read ({error}). Use another checkpoint.",
            ) from error
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
        # Any chunks may overlap the wanted box: they were cut by the mesh that saved.
        for chunk in entry.chunks:
            common = overlap(chunk, offset, out.shape)
            if common is None:
                continue
            source, target = self._chunk(entry, chunk), out
            for dim, (low, high) in enumerate(common):
                source = source.narrow(dim, low - chunk.offset[dim], high - low)
                target = target.narrow(dim, low - offset[dim], high - low)
            # Casts and moves to the device on the way: dtypes of the file and of the run may
            # differ.
            target.copy_(source)
            self.bytes_read += source.nbytes
            advance("read", source.nbytes)

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
