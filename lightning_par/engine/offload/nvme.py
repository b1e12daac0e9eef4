"""The place of a parameter's states in a file, and how they come into memory for an update.

Note [Two ways]: the file is mapped into memory. What happens now and then goes through the map:
checkpoints, and parameters that somebody changed. Updates read and write past the cache of the
system, with O_DIRECT, in tiles: one is read and one written while one is computed. Where the file
system has no O_DIRECT, or does not show through one way what was written through the other, updates
use the map, too; the system is asked for the pages of a bucket while the one before is updated, and
told that they are not needed after that.

**Source**: Rajbhandari et al. 2104.07857 (ZeRO-Infinity), section 6.3 (aligned buffers, reads and
writes beside the computation).
"""

import mmap
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from lightning_par.engine.offload.adam import AdamTensors
from lightning_par.errors import OffloadError

__all__ = ["PAGE", "TILE", "DirectIOFile", "DirectNvmeRange", "NvmeRange", "open_direct", "padded"]

PAGE = mmap.PAGESIZE
TILE = 2**21
"""Entries that are read, computed and written together."""
_BUFFERS = 4
"""One that is computed with, two that are read ahead, one that is written."""

_Place = tuple[int, int]
"""First byte and size, both of whole pages."""


def padded(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


@dataclass(eq=False)
class NvmeRange:
    """A range of a mapped file, on whole pages.

    Attributes:
        mapped: The file.
        start: First byte.
        size: Bytes.
    """

    mapped: mmap.mmap
    start: int
    size: int

    def announce(self) -> None:
        """Say that they are needed after what is updated now."""
        if self.size:
            self.mapped.madvise(mmap.MADV_WILLNEED, self.start, self.size)

    def fetch(self, tensors: AdamTensors) -> None:
        """Begin to read the states of a parameter that is updated next."""

    def visit(self, tensors: AdamTensors) -> Generator[AdamTensors]:
        """Give the states in parts that are in memory; each is stored when the next is asked for.

        Args:
            tensors: Views of the map, and where gradient and parameter are.
        """
        yield tensors
        self.leave()

    def leave(self) -> None:
        """Give the memory of the range back; what was changed is written."""
        if self.size:
            self.mapped.madvise(mmap.MADV_DONTNEED, self.start, self.size)

    def flush(self) -> None:
        """Write what was changed through the map."""
        if self.size:
            self.mapped.flush(self.start, self.size)


class DirectIOFile:
    """Reads and writes whole pages of a file past the cache, each in a thread of its own.

    Args:
        file: Descriptor that was opened with O_DIRECT; closed with this.
        tile_bytes: Of the largest tile.
    """

    def __init__(self, file: int, tile_bytes: int) -> None:
        self._file = file
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(mmap.mmap(-1, tile_bytes))
        self._reader = ThreadPoolExecutor(1, "offload-reads")
        self._writer = ThreadPoolExecutor(1, "offload-writes")
        self._writing: list[Future[None]] = []

    def read(self, places: Sequence[_Place]) -> "Future[mmap.mmap]":
        """Begin to read places into a buffer, one after the other; it is there until `write`."""

        def job() -> mmap.mmap:
            buffer = self._free.get()
            try:
                _transfer(os.preadv, self._file, buffer, places)
            except BaseException:
                self._free.put(buffer)
                raise
            return buffer

        return self._reader.submit(job)

    def write(self, buffer: mmap.mmap, places: Sequence[_Place]) -> None:
        """Begin to write what `read` gave to its places; see `settle`."""

        def job() -> None:
            try:
                _transfer(os.pwritev, self._file, buffer, places)
            finally:
                self._free.put(buffer)

        self._writing.append(self._writer.submit(job))

    def discard(self, reading: "Future[mmap.mmap]") -> None:
        """Give up what `read` gives, whenever it does."""

        def free(done: "Future[mmap.mmap]") -> None:
            if done.exception() is None:
                self._free.put(done.result())

        reading.add_done_callback(free)

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            OffloadError: Something could not be written.
        """
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def close(self) -> None:
        """End the threads and close the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        os.close(self._file)


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    file: int,
    buffer: mmap.mmap,
    places: Sequence[_Place],
) -> None:
    view, at = memoryview(buffer), 0
    for start, size in places:
        done = 0
        while done < size:
            try:
                moved = call(file, [view[at + done : at + size]], start + done)
            except OSError as error:
                raise OffloadError(f"the file of optimizer states failed: {error}.") from error
            if not moved:
                raise OffloadError("the file of optimizer states ended too early.")
            done += moved
        at += size


@dataclass(eq=False)
class DirectNvmeRange(NvmeRange):
    """A range that updates read and write with O_DIRECT.

    Master, mean and square begin on pages of their own.

    Attributes:
        direct: The same file.
    """

    direct: DirectIOFile
    _coming: "Future[mmap.mmap] | None" = None

    def announce(self) -> None:
        """Nothing is read before it is the next."""

    def fetch(self, tensors: AdamTensors) -> None:
        """Begin to read the first tile."""
        if self._coming is None and tensors.master.numel():
            self._coming = self.direct.read(self._places(tensors, 0, TILE))

    def visit(self, tensors: AdamTensors) -> Generator[AdamTensors]:
        """Give the states tile by tile."""
        entries = tensors.master.numel()
        self.fetch(tensors)
        coming, self._coming = self._coming, None
        for low in range(0, entries, TILE):
            high = min(low + TILE, entries)
            assert coming is not None
            here, buffer = coming, coming.result()
            if high < entries:
                coming = self.direct.read(self._places(tensors, high, high + TILE))
            places = self._places(tensors, low, high)
            try:
                yield _in_buffer(tensors.part(low, high), buffer, places)
            except GeneratorExit:  # an update failed; others may follow, and need buffers
                for reading in {here, coming}:
                    self.direct.discard(reading)
                raise
            self.direct.write(buffer, places)

    def _places(self, tensors: AdamTensors, low: int, high: int) -> list[_Place]:
        """Return where entries low .. high - 1 are; `low` is a multiple of a tile."""
        start, found = self.start, []
        for state in (tensors.master, tensors.mean, tensors.square):
            size = state.element_size()
            end = min(high, state.numel())
            found.append((start + low * size, padded((end - low) * size, PAGE)))
            start += padded(state.numel() * size, PAGE)
        return found


def _in_buffer(tensors: AdamTensors, buffer: mmap.mmap, places: Sequence[_Place]) -> AdamTensors:
    """Return the same part with its states in a buffer."""
    memory, at, found = torch.frombuffer(buffer, dtype=torch.uint8), 0, []
    for state, (_, size) in zip(
        (tensors.master, tensors.mean, tensors.square), places, strict=True
    ):
        used: Tensor = memory[at : at + state.numel() * state.element_size()]
        found.append(used.view(state.dtype))
        at += size
    master, mean, square = found
    return AdamTensors(
        master=master,
        mean=mean,
        square=square,
        grad=tensors.grad,
        out=tensors.out,
        first=tensors.first,
    )


def open_direct(file: int, mapped: mmap.mmap) -> int | None:
    """Open a file once more, with O_DIRECT.

    Args:
        file: Descriptor; its first page holds zeros.
        mapped: The file.

    Returns:
        A descriptor; None where that is not possible, or not safe; see Note [Two ways].
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        agrees = _agrees(direct, mapped)
    except OSError:
        agrees = False
    if agrees:
        return direct
    os.close(direct)
    return None


def _agrees(direct: int, mapped: mmap.mmap) -> bool:
    """Whether each way shows what was written through the other; leaves zeros."""
    page = mmap.mmap(-1, PAGE)
    mapped[:PAGE] = b"\1" * PAGE
    mapped.flush(0, PAGE)
    seen = os.preadv(direct, [page], 0) == PAGE and page[:] == b"\1" * PAGE
    page[:] = bytes(PAGE)
    return seen and os.pwritev(direct, [page], 0) == PAGE and mapped[:PAGE] == bytes(PAGE)
