"""Files with checksums (safetensors, JSON), and atomic replacement of files and folders.

Note [Checksum]: CRC-32 from zlib. It detects every single-bit error and every burst of up to 32
bits, and any other damage with probability 1 - 2^-32. It guards against accidents; it is no
signature. It is the cheapest checksum in Python's standard library: see benchmarks/RESULTS.md.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from lightning_par.checkpoint.file_system import current_of, Place, UrlPath
from lightning_par.checkpoint.progress import advance
from lightning_par.errors import CheckpointError, either

__all__ = [
    "DTYPES",
    "NAME_LENGTH",
    "ChecksumFile",
    "FileRecord",
    "check_regular",
    "discard",
    "how_to_store",
    "missing_in",
    "partial_path",
    "partials_of",
    "publish",
    "remove_left_over",
    "remove_path",
    "replacing",
    "sync_files",
    "tensors_length",
    "write_json",
    "write_object",
    "write_tensors",
]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a dtype in the safetensors format -> dtype."""
_CHUNK = 1 << 20
"""Bytes that are summed and then written at a time, so that they are still in the CPU cache."""
NAME_LENGTH = 255
"""Bytes that a name may have on common file systems."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
# Constants of Linux's headers, which Python does not export.
_RENAME_EXCHANGE = 2
"""Flag of `renameat2` that swaps two paths."""
_AT_FDCWD = -100
"""Directory argument of `renameat2` for paths relative to the working directory."""


P = TypeVar("P", Path, UrlPath, Place)


@dataclass(frozen=True)
class FileRecord:
    """Length and checksum of a file, as the manifest lists them.

    Attributes:
        length: Length in bytes.
        crc32: CRC-32 as 8 hexadecimal digits.
    """

    length: int
    crc32: str


class _Shaped(Protocol):
    """A tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""


class ChecksumFile:
    """File opened for writing that computes a checksum on the way; see `sync_files` for fsync.

    Args:
        path: File to create or overwrite; behind a URL it is only appended to.
        parts: Open an existing file instead, to write parts of it.
    """

    def __init__(self, path: Place, *, parts: bool = False) -> None:
        self._upload = path.create() if isinstance(path, UrlPath) else None
        # Not `open`: a buffer would copy the bytes once more, and `pwrite` needs a descriptor.
        if isinstance(path, Path):
            self._descriptor = os.open(path, os.O_WRONLY if parts else _NEW, 0o666)
        self.start_part(0)

    def start_part(self, place: int) -> None:
        """Move to a byte of the file; length and checksum begin anew."""
        self._place, self._length, self._sum = place, 0, 0

    def write(self, data: Any) -> None:
        """Append bytes.

        Args:
            data: Bytes, or any object with a one-dimensional buffer of bytes.

        Raises:
            OSError: The disk is full, for example.
        """
        view = memoryview(data)
        # Summed and written in pieces: the second pass over a piece finds it in the cache.
        for low in range(0, len(view), _CHUNK):
            part = view[low : low + _CHUNK]
            self._sum = zlib.crc32(part, self._sum)
            if self._upload is not None:
                self._upload.write(part)
                continue
            while part:  # a write may be partial
                count = os.pwrite(self._descriptor, part, self._place)
                part, self._place = part[count:], self._place + count
        self._length += len(view)

    def write_values(
        self, values: Tensor, places: Iterable[int] | None = None, run: int | None = None
    ) -> None:
        """Append the bytes of a tensor, or write them in runs; reports its progress.

        Args:
            values: Tensor on any device.
            places: First byte of each run of its values in the file; None: they are appended.
            run: Number of values in a run; None: all.

        Raises:
            OSError: The disk is full, for example.
        """
        if not values.numel():
            return
        # Row-major, as both forms hold it; of a tensor that is so already nothing is copied.
        flat = values.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().data  # NumPy lacks bfloat16 and float8
        size = len(data) if run is None else run * values.element_size()
        # strict: a run more or less than the box has values means that the file is laid out
        # wrongly.
        for low, place in zip(range(0, len(data), size), places or (self._place,), strict=True):
            self._place = place
            # In pieces for the bar's sake, which would otherwise stand still for the length of a
            # tensor.
            for first in range(low, low + size, _CHUNK):
                part = data[first : min(first + _CHUNK, low + size)]
                self.write(part)
                advance("write", len(part))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._upload is not None:
            self._upload.close()
        else:
            os.close(self._descriptor)

    @property
    def record(self) -> FileRecord:
        """Length and checksum of the bytes written since the part was started."""
        return FileRecord(self._length, f"{self._sum:08x}")


def write_json(path: Place, value: Any) -> FileRecord:
    """Write a value as JSON in one line.

    Args:
        path: File to write.
        value: Value of JSON types.

    Returns:
        Length and checksum of the file.
    """
    # Without indent, which would switch Python to its slow encoder.
    with ChecksumFile(path) as file:
        file.write(json.dumps(value, allow_nan=False).encode())
    return file.record


def write_tensors(
    file: ChecksumFile,
    tensors: Mapping[str, _Shaped],
    metadata: Mapping[str, str] | None = None,
    *,
    read: Callable[[Any], Tensor] = lambda tensor: tensor,
) -> None:
    """Append a safetensors file, tensor by tensor.

    Args:
        file: Receives it.
        tensors: Key -> tensor, on any device, or something that stands for it.
        metadata: Free text entries of the header.
        read: Gives the tensor for what stands for it, so that one tensor at a time is in memory.

    Raises:
        OSError: The disk is full, for example.
    """
    # Not safetensors.save_file: it wants all tensors in memory and computes no checksum.
    file.write(_header(tensors, metadata))
    for key in _file_order(tensors):
        tensor = read(tensors[key])
        # The header is written: a tensor of another size would shift all that follow.
        assert (tensor.dtype, tensor.shape) == (tensors[key].dtype, tensors[key].shape), key
        file.write_values(tensor)


def how_to_store(tensor: Tensor) -> str:
    """Return what to store in place of a tensor of a dtype that is not in `DTYPES`."""
    if tensor.is_complex():
        return (
            "Store it as real numbers, torch.view_as_real(tensor), of which "
            "torch.view_as_complex makes the complex tensor again."
        )
    return f"Convert it to one of {either(sorted(map(str, DTYPES.values())))}."


def tensors_length(tensors: Mapping[str, Tensor]) -> int:
    """Return the length of what `write_tensors` writes."""
    return len(_header(tensors, None)) + sum(tensor.nbytes for tensor in tensors.values())


def _header(tensors: Mapping[str, _Shaped], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    place = 0
    for key in _file_order(tensors):
        dtype, shape = tensors[key].dtype, tensors[key].shape
        end = place + shape.numel() * dtype.itemsize
        header[key] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    # Format of safetensors: 8 bytes of length, JSON, and the bytes at offsets relative to its
    # end.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return len(text).to_bytes(8, "little") + text


def _file_order(tensors: Mapping[str, _Shaped]) -> list[str]:
    # Widest dtype first: after such a tensor the next one is aligned for any narrower dtype.
    return sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path, which atomically replaces `path` at the end.

    If the body raises, the temporary file or folder is removed, and an existing `path` stays.

    Args:
        path: Final path, whose parent is created.
    """
    # In the same folder, hence on the same file system: a rename between two is not atomic.
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(path)
    partial = partial_path(path)
    try:
        yield partial
        publish(partial, path)
    # Also for KeyboardInterrupt: half a file under a hidden name would stay for ever.
    except BaseException:
        remove_path(partial)
        raise


def write_object(path: Path, value: Any) -> None:
    """Write one file with `torch.save`, atomically.

    Args:
        path: File to write; an existing one is replaced when the new one is complete.
        value: Any value that `torch.save` takes.

    Raises:
        OSError: The disk is full, for example; or RuntimeError, from `torch.save`.
    """
    with replacing(path) as partial:
        torch.save(value, partial)


def check_regular(path: Place) -> None:
    """Refuse a file of a checkpoint that is something else.

    Args:
        path: The file; what is above it may be a link. A store behind a URL has no others.

    Raises:
        CheckpointError: It is a link, which may lead out of the checkpoint, or a pipe or a device,
            which may give no data for ever.
        FileNotFoundError: There is none.
    """
    # `lstat`, which does not follow the link itself.
    if isinstance(path, Path) and not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(
            "LP502",
            f"{path.name} is a link, a pipe or a device, but every file of a checkpoint is a "
            "regular file. Use another checkpoint.",
        )


def sync_files(paths: Iterable[Place]) -> None:
    """Call fsync on files, and on folders, whose entries (names) it makes durable.

    Call it once for all files after they are written: the first fsync flushes most of what the
    others would wait for.

    Args:
        paths: Files and folders; a store behind a URL keeps what was closed.
    """
    for path in (path for path in paths if isinstance(path, Path)):
        # Read-only is enough: fsync is of the file, whoever wrote to it.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(partial: Place, final: Place) -> None:
    """Rename a complete file or folder to its final path, and remove what was there before.

    Where the system can swap two paths (Linux, on local file systems), a complete checkpoint is at
    the final path at any moment. Elsewhere the old one is renamed first.

    Args:
        partial: Complete file or folder on the file system of `final`.
        final: Final path; an existing folder, file or link is replaced. Of a URL see
            Note [Saves to a store].
    """
    if isinstance(final, UrlPath):
        final.commit(partial.name)
        return
    assert isinstance(partial, Path)  # as `partial_path` made it
    # Contents before the name: after a crash a name must not point to unwritten data.
    sync_files([partial])
    aside = None
    # `lexists`: a dangling link is there, too, and a folder cannot be renamed onto it.
    if not os.path.lexists(final):
        partial.rename(final)
    elif _exchange(partial, final):
        aside = partial
    else:
        # Between the two renames the name is missing for a moment: the old one is whole under
        # `.old`.
        aside = partial.with_name(f"{partial.name}.old")
        final.rename(aside)
        partial.rename(final)
    # The rename itself is an entry of the folder above.
    sync_files([final.parent])
    # Last: if we are killed here, the new one is in place and only rubbish is left.
    if aside is not None:
        remove_path(aside)


def discard(partial: Place, final: Place) -> bool:
    """Remove what a save has written, which failed; return whether an earlier one is there.

    Args:
        partial: What was not published.
        final: Final path.
    """
    # The other ranks wait to be told, so that nothing is raised here.
    if isinstance(final, UrlPath):
        with contextlib.suppress(OSError, CheckpointError):
            current = current_of(final)
            # A store may have made it the current one, and not have been able to say so.
            if current != partial:
                remove_path(partial)
            return current != final
        return False
    with contextlib.suppress(OSError):
        remove_path(partial)
    return os.path.lexists(final)  # unlike `Path.exists`, also of a name that is too long


def missing_in(folder: Place, names: Iterable[str]) -> set[str]:
    """Return which names a folder has not."""
    if isinstance(folder, UrlPath):
        return set(names) - folder.names()
    return {name for name in names if not (folder / name).exists()}


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically; return False where the system cannot."""
    # Python's os module has no binding of it; the C library has one on Linux.
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    # Nonzero also where the file system has no exchange (NFS: EINVAL).
    return bool(
        swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    )


def partial_path(path: P, name: str | None = None) -> P:
    """Return a path for what is to become `path`, which no other save is given.

    On SLURM, Lightning resumes from the highest number after ``hpc_ckpt_`` in any name: that of a
    save that was killed must not be among them.

    Args:
        path: Final path, in the same folder; of a URL, the folder.
        name: The name that another rank was given.
    """
    if isinstance(path, UrlPath):
        return path / (name or f"save-{secrets.token_hex(4)}")
    if name is not None:
        return path.with_name(name)
    # Two runs that save to one path must not write into one file. What differs is the suffix, as
    # torch names the folder in its archive after the rest.
    return path.with_name(f"{_hidden(path.name)}.partial-{secrets.token_hex(4)}")


def partials_of(path: Path) -> list[Path]:
    """Return what saves to `path` have not finished, or have not yet."""
    # Without a suffix it is of an earlier version.
    pattern = re.compile(rf"{re.escape(_hidden(path.name))}\.partial(-[0-9a-f]{{8}})?")
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return [partial for partial in found if pattern.fullmatch(partial.name)]


def remove_left_over(path: Place) -> None:
    """Remove what saves to `path` that were killed have left; of a URL, the next save does."""
    if isinstance(path, UrlPath):
        return
    for partial in partials_of(path):
        remove_path(partial)


def _hidden(name: str) -> str:
    """Return the beginning of the name of what is to become `name`, short enough for any suffix."""
    hidden = os.fsencode(f".{name.replace('hpc_ckpt_', 'hpc-')}")
    # Behind it come ".partial-", 8 digits, and perhaps ".old".
    room = NAME_LENGTH - 21
    if len(hidden) > room:
        hidden = hidden[: room - 9] + f"-{zlib.crc32(hidden):08x}".encode()
    return os.fsdecode(hidden)


def remove_path(path: Place) -> None:
    """Remove a file, a link or a folder; do nothing if it does not exist.

    Args:
        path: Path to remove; of a link, the link.
    """
    if isinstance(path, UrlPath):
        path.remove()
    elif path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        hidden = path
        # Renamed first: a crash in the middle must not leave a checkpoint with half its files.
        if not path.name.startswith("."):
            hidden = partial_path(path)
            path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
