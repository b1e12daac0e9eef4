"""Files with checksums (safetensors, JSON), and atomic replacement of files and folders.

Note [Checksum]: CRC-32 from zlib. It detects every single-bit error and every burst of up to 32
bits, and any other damage with probability 1 - 2^-32. It guards against accidents; it is no
signature. It is the cheapest checksum in Python's standard library: see benchmarks/RESULTS.md.
"""

import contextlib
import ctypes
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from lightning_par.checkpoint.progress import advance
from lightning_par.errors import CheckpointError

__all__ = [
    "DTYPES",
    "ChecksumFile",
    "FileRecord",
    "check_file",
    "check_regular",
    "file_order",
    "partial_path",
    "publish",
    "read_regular",
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
_PART = 16 << 20
"""Bytes after which a save says how far it has come."""
# Constants of Linux's headers, which Python does not export.
_RENAME_EXCHANGE = 2
"""Flag of `renameat2` that swaps two paths."""
_AT_FDCWD = -100
"""Directory argument of `renameat2` for paths relative to the working directory."""


@dataclass(frozen=True)
class FileRecord:
    """Length and checksum of a file, as the manifest lists them.

    Attributes:
        length: Length in bytes.
        crc32: CRC-32 as 8 hexadecimal digits.
    """

    length: int
    crc32: str


class ChecksumFile:
    """File opened for writing that computes its checksum on the way; see `sync_files` for fsync.

    Args:
        path: File to create or overwrite.
        place: First byte of the part of an existing file to write instead.
    """

    def __init__(self, path: Path, place: int | None = None) -> None:
        self._file = path.open("wb" if place is None else "r+b", buffering=0)
        self._file.seek(place or 0)
        self._length = self._sum = 0

    def write(self, data: Any) -> None:
        """Append bytes.

        Args:
            data: Bytes, or any object with a one-dimensional buffer of bytes.

        Raises:
            OSError: The disk is full, for example.
        """
        view = memoryview(data)
        for low in range(0, len(view), _CHUNK):
            part = view[low : low + _CHUNK]
            self._sum = zlib.crc32(part, self._sum)
            while part:  # an unbuffered write may be partial
                part = part[self._file.write(part) :]
        self._length += len(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def record(self) -> FileRecord:
        """Length and checksum of the bytes written so far."""
        return FileRecord(self._length, f"{self._sum:08x}")


def write_json(path: Path, value: Any) -> FileRecord:
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
    path: Path,
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
    *,
    place: int | None = None,
) -> FileRecord:
    """Write a safetensors file, tensor by tensor.

    Args:
        path: File to write.
        place: First byte of the part of an existing file to write instead, of `tensors_length`.
        specs: Key -> dtype and shape of every tensor.
        values: Every key of `specs` with its tensor, in the order of `file_order`; may be lazy, so
            that one tensor at a time is in memory.
        metadata: Free text entries of the header.

    Returns:
        Length and checksum of the file.

    Raises:
        OSError: The disk is full, for example.
    """
    # Not safetensors.save_file: it wants all tensors in memory and computes no checksum.
    text = _header(specs, metadata)
    with ChecksumFile(path, place) as file:
        file.write(text)
        for key, tensor in values:
            assert specs[key] == (tensor.dtype, tuple(tensor.shape)), key
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().view(-1)
                # NumPy lacks bfloat16 and float8.
                for part in flat.view(torch.uint8).split(_PART):
                    file.write(part.numpy())
                    advance("write", len(part))
    return file.record


def tensors_length(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Return the length of the file that `write_tensors` writes.

    Args:
        specs: Key -> dtype and shape of every tensor.
    """
    sizes = (torch.Size(shape).numel() * dtype.itemsize for dtype, shape in specs.values())
    return len(_header(specs, None)) + sum(sizes)


def _header(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    place = 0
    for key in file_order(specs):
        dtype, shape = specs[key]
        end = place + torch.Size(shape).numel() * dtype.itemsize
        header[key] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path, which atomically replaces `path` at the end.

    If the body raises, the temporary file or folder is removed, and an existing `path` stays.

    Args:
        path: Final path, whose parent is created.
    """
    # In the same folder, hence on the same file system: a rename between two is not atomic.
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    remove_path(partial)
    try:
        yield partial
        publish(partial, path)
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


def file_order(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    """Return the keys in the order in which tensors are stored: widest dtype first.

    After a tensor of a wide dtype the next one is aligned for any narrower dtype.

    Args:
        specs: Key -> dtype and shape, as for `write_tensors`.
    """
    return sorted(specs, key=lambda key: -specs[key][0].itemsize)


def check_file(path: Path, record: FileRecord) -> str | None:
    """Compare a file with its length and checksum.

    Args:
        path: File to read.
        record: Length and checksum that were written.

    Returns:
        What is wrong with the file; None if nothing is.
    """
    try:
        check_regular(path)
        length = path.stat().st_size
        if length != record.length:
            return f"{path.name} has {length} bytes, but {record.length} were written"
        found = 0
        for part in _read(path):
            found = zlib.crc32(part, found)
            advance("verify", len(part))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except CheckpointError as error:
        return error.message
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    if f"{found:08x}" != record.crc32:
        return f"{path.name} is damaged: its checksum is {found:08x}, {record.crc32} was written"
    return None


def check_regular(path: Path) -> None:
    """Refuse a file of a checkpoint that is something else.

    Args:
        path: The file; what is above it may be a link.

    Raises:
        CheckpointError: It is a link, which may lead out of the checkpoint, or a pipe or a device,
            which may give no data for ever.
        FileNotFoundError: There is none.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(
            "LP502", f"{path.name} is no regular file, as every file of a checkpoint is"
        )


def read_regular(path: Path) -> bytes:
    """Return the content of a file; see `check_regular`."""
    check_regular(path)
    return path.read_bytes()


def _read(path: Path) -> Iterator[memoryview]:
    # In pieces through one buffer: a file may be larger than the memory.
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield view[:count]


def sync_files(paths: Iterable[Path]) -> None:
    """Call fsync on files, and on folders, whose entries (names) it makes durable.

    Call it once for all files after they are written: the first fsync flushes most of what the
    others would wait for.

    Args:
        paths: Files and folders.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Rename a complete file or folder to its final path, and remove what was there before.

    Where the system can swap two paths (Linux, on local file systems), a complete checkpoint is at
    the final path at any moment. Elsewhere the old one is renamed first.

    Args:
        partial: Complete file or folder on the file system of `final`.
        final: Final path; an existing folder, file or link is replaced.
    """
    # Contents before the name: after a crash a name must not point to unwritten data.
    sync_files([partial])
    aside = None
    if not os.path.lexists(final):
        partial.rename(final)
    elif _exchange(partial, final):
        aside = partial
    else:
        aside = partial.with_name(f"{partial.name}.old")
        final.rename(aside)
        partial.rename(final)
    sync_files([final.parent])
    if aside is not None:
        remove_path(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically; return False where the system cannot."""
    # Python's os module has no binding of it; the C library has one on Linux.
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    return bool(
        swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    )


def partial_path(path: Path) -> Path:
    """Return the path of what is to become `path`.

    On SLURM, Lightning resumes from the highest number after ``hpc_ckpt_`` in any name: that of a
    save that was killed must not be among them.

    Args:
        path: Final path, in the same folder.
    """
    return path.with_name(f".{path.name.replace('hpc_ckpt_', 'hpc-')}.partial")


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder; do nothing if it does not exist.

    Args:
        path: Path to remove; of a link, the link.
    """
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        hidden = path
        # Renamed first: a crash in the middle must not leave a checkpoint with half its files.
        if not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.removed.partial")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
