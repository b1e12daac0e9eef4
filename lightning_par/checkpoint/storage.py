"""Files with a checksum: tensors as safetensors, text as JSON, folders that appear whole or not at
all.

Note [Checksum]: CRC-32 from zlib. It finds every single-bit error and every burst of up to 32 bits,
and any other damage but for one case in 2^32. It guards against accidents; it is no signature. Of
what Python brings along it costs the least: see benchmarks/RESULTS.md.
"""

import contextlib
import ctypes
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "ChecksumFile",
    "FileRecord",
    "check_file",
    "file_order",
    "publish",
    "remove_path",
    "replacing",
    "sync_files",
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
"""Names of the safetensors format."""
_CHUNK = 1 << 20
"""Bytes that are written and summed at a time; they stay in the cache between the two."""
_EXCHANGE = 2
"""The flag of `renameat2` that swaps two paths."""
_HERE = -100
"""Stands for the working directory in `renameat2`."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file.

    Attributes:
        length: In bytes.
        crc32: As 8 hexadecimal digits.
    """

    length: int
    crc32: str


class ChecksumFile:
    """A file that is summed while it is written; `sync_files` brings it to the disk.

    Args:
        path: Created or overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._length = self._sum = 0

    def write(self, data: Any) -> None:
        """Append bytes.

        Args:
            data: Anything with a flat buffer.

        Raises:
            OSError: The disk is full, for example.
        """
        view = memoryview(data)
        for low in range(0, len(view), _CHUNK):
            part = view[low : low + _CHUNK]
            self._sum = zlib.crc32(part, self._sum)
            while part:  # the system may take less than all
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
        """Length and checksum of what was written."""
        return FileRecord(self._length, f"{self._sum:08x}")


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a value as JSON, in one line: an indent would take Python's slow encoder.

    Args:
        path: Where to.
        value: Made of JSON's types.
    """
    with ChecksumFile(path) as file:
        file.write(json.dumps(value, allow_nan=False).encode())
    return file.record


def write_tensors(
    path: Path,
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write a safetensors file, tensor by tensor.

    Args:
        path: Where to.
        specs: Key -> dtype and shape of every tensor.
        values: Every key of `specs` with its tensor, in the order of `file_order`; at most one of
            them has to be in memory.
        metadata: Strings for the header.

    Raises:
        OSError: The disk is full, for example.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    place = 0
    for key in file_order(specs):
        dtype, shape = specs[key]
        end = place + torch.Size(shape).numel() * dtype.itemsize
        header[key] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksumFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for key, tensor in values:
            assert specs[key] == (tensor.dtype, tuple(tensor.shape)), key
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy())
    return file.record


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a hidden path to write to; what is there at the end takes the place of `path`.

    If the body raises, it is removed, and what had the name before stays.

    Args:
        path: Its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    remove_path(partial)
    try:
        yield partial
        publish(partial, path)
    except BaseException:
        remove_path(partial)
        raise


def write_object(path: Path, value: Any) -> None:
    """Write one file with `torch.save`; what had that name stays until the new one is whole.

    Args:
        path: Where to.
        value: What `torch.save` takes.

    Raises:
        OSError: The disk is full, for example; or RuntimeError, from `torch.save`.
    """
    with replacing(path) as partial:
        torch.save(value, partial)


def file_order(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    """Return the keys with the widest dtype first, so that every tensor is aligned.

    Args:
        specs: As for `write_tensors`.
    """
    return sorted(specs, key=lambda key: -specs[key][0].itemsize)


def check_file(path: Path, record: FileRecord) -> str | None:
    """Compare a file with its record.

    Returns:
        What is wrong with it, or None.
    """
    try:
        length = path.stat().st_size
        if length != record.length:
            return f"{path.name} has {length} bytes, but {record.length} were written"
        found = 0
        for part in _read(path):
            found = zlib.crc32(part, found)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    if f"{found:08x}" != record.crc32:
        return f"{path.name} is damaged: its checksum is {found:08x}, {record.crc32} was written"
    return None


def _read(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield view[:count]


def sync_files(paths: Iterable[Path]) -> None:
    """Bring files, or the names of the files in folders, to the disk.

    Together, after all have been written: the first then makes the file system write most of what
    the others wait for.

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
    """Give a complete folder its final name; what had that name before is then removed.

    There is no moment without a complete checkpoint under the final name, where the system can
    swap two paths (Linux, on its own file systems). Elsewhere the old one is renamed first.

    Args:
        partial: On the same file system.
        final: May exist, as a folder, a file or a link.
    """
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
    """Swap two paths in one step; return False where the system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    return bool(swap(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder; do nothing if it is not there.

    A folder is renamed first, so that what a crash leaves behind is no checkpoint.
    """
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        doomed = path
        if not path.name.startswith("."):
            doomed = path.with_name(f".{path.name}.removed.partial")
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
