"""Optimizer states in a file on NVMe: where those of a parameter are, and how updates read them.

Note [Two ways]: the file is mapped into memory. Rare accesses use the map: checkpoints, and
parameters that the user changed. Updates bypass the page cache with O_DIRECT, in tiles: one is read
and one written while one is computed. Where the file system has no O_DIRECT, or one way does not
show what was written through the other, updates use the map, too; then the pages of a bucket are
prefetched while the one before is updated, and dropped from memory after its own update.

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
"""One tile is computed, two are read ahead, one is written."""

_Extent = tuple[int, int]
"""First byte and size of a part of the file, both multiples of a page, as O_DIRECT requires."""


def padded(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass(eq=False)
class NvmeRange:
    """The range of a mapped file that holds the states of one parameter, in whole pages.

    Attributes:
        mapped: The file.
        start: Offset of the first byte.
        size: Number of bytes; 0 for an empty shard, which the system calls would refuse.
    """

    mapped: mmap.mmap
    start: int
    size: int

    def will_need(self) -> None:
        """Prefetch these pages; they are in the bucket that is updated next."""
        if self.size:
            self.mapped.madvise(mmap.MADV_WILLNEED, self.start, self.size)

    def prefetch(self, tensors: AdamTensors) -> None:
        """Start to read the states of the parameter that is updated next."""

    def tiles(self, tensors: AdamTensors) -> Generator[AdamTensors]:
        """Yield slices whose states are in memory; each is written when the next is requested.

        Args:
            tensors: States as views of the map, gradient and output in memory.
        """
        # The map is memory: one slice, which the system reads as it is touched.
        yield tensors
        self.release()

    def release(self) -> None:
        """Free the memory of the pages; the system writes those that were changed."""
        if self.size:
            self.mapped.madvise(mmap.MADV_DONTNEED, self.start, self.size)

    def flush(self) -> None:
        """Write what was changed through the map, so that O_DIRECT reads it, too."""
        if self.size:
            self.mapped.flush(self.start, self.size)


class DirectIOFile:
    """Reads and writes whole pages of a file with O_DIRECT: one thread reads, another writes.

    Args:
        file: Descriptor opened with O_DIRECT; `close` closes it.
        tile_bytes: Bytes of the largest tile.
    """

    def __init__(self, file: int, tile_bytes: int) -> None:
        self._file = file
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_BUFFERS):
            # O_DIRECT wants memory that begins on a page: an anonymous map does.
            self._free.put(mmap.mmap(-1, tile_bytes))
        # Two threads: a read may wait for a buffer that only a write frees.
        self._reader = ThreadPoolExecutor(1, "offload-reads")
        self._writer = ThreadPoolExecutor(1, "offload-writes")
        self._writing: list[Future[None]] = []

    def read(self, extents: Sequence[_Extent]) -> "Future[mmap.mmap]":
        """Start to read extents into a buffer, which is the caller's until `write`."""

        def job() -> mmap.mmap:
            buffer = self._free.get()  # blocks the reader until a write has freed one
            try:
                _transfer(os.preadv, self._file, buffer, extents)
            # Freed here, as the caller never gets it.
            except BaseException:
                self._free.put(buffer)  # a lost buffer would block the reader for good
                raise
            return buffer

        return self._reader.submit(job)

    def write(self, buffer: mmap.mmap, extents: Sequence[_Extent]) -> None:
        """Start to write a buffer of `read` back to its extents; `wait` tells whether it worked."""

        def job() -> None:
            try:
                _transfer(os.pwritev, self._file, buffer, extents)
            finally:
                self._free.put(buffer)

        self._writing.append(self._writer.submit(job))

    def discard(self, reading: "Future[mmap.mmap]") -> None:
        """Free the buffer of a `read` that nobody waits for, once it is complete."""

        def free(done: "Future[mmap.mmap]") -> None:
            if done.exception() is None:
                self._free.put(done.result())

        # Also of a read that is still running.
        reading.add_done_callback(free)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            OffloadError: Something could not be written.
        """
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def close(self) -> None:
        """Stop the threads and close the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        os.close(self._file)


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    file: int,
    buffer: mmap.mmap,
    extents: Sequence[_Extent],
) -> None:
    """Read or write extents of the file, which lie one behind the other in the buffer."""
    view, at = memoryview(buffer), 0
    for start, size in extents:
        done = 0
        while done < size:  # the system may move less than it was asked for
            try:
                moved = call(file, [view[at + done : at + size]], start + done)
            except OSError as error:
                raise OffloadError(
                    "LP602",
                    "the file of optimizer states on the disk could not be read or written: "
                    f"{error}. Use another disk in offload_optimizer='nvme:/folder', or "
                    "offload_optimizer=True.",
                ) from error
            if not moved:
                raise OffloadError(
                    "LP602",
                    "the file of optimizer states on the disk has become shorter. Use another disk "
                    "in offload_optimizer='nvme:/folder', or offload_optimizer=True.",
                )
            done += moved
        at += size


@dataclass(eq=False)
class DirectNvmeRange(NvmeRange):
    """A range that updates read and write with O_DIRECT.

    Each of master, mean and square begins on a page of its own.

    Attributes:
        direct: The same file.
    """

    direct: DirectIOFile
    _first_read: "Future[mmap.mmap] | None" = None

    def will_need(self) -> None:
        """Do nothing: the buffers hold no more than the next tiles."""

    def prefetch(self, tensors: AdamTensors) -> None:
        """Start to read the first tile."""
        if self._first_read is None and tensors.master.numel():
            self._first_read = self.direct.read(self._extents(tensors, 0, TILE))

    def tiles(self, tensors: AdamTensors) -> Generator[AdamTensors]:
        """Yield tile after tile."""
        entries = tensors.master.numel()
        self.prefetch(tensors)
        # Started by the parameter before, so that the disk has worked already.
        coming, self._first_read = self._first_read, None
        for low in range(0, entries, TILE):
            high = min(low + TILE, entries)
            assert coming is not None
            here, buffer = coming, coming.result()
            # The next tile is read while the caller computes this one.
            if high < entries:
                coming = self.direct.read(self._extents(tensors, high, high + TILE))
            extents = self._extents(tensors, low, high)
            try:
                yield _in_buffer(tensors.part(low, high), buffer, extents)
            except GeneratorExit:  # an update failed; others may follow, and need buffers
                # A set, as both may be the same future; a finished read has a buffer as well.
                for reading in {here, coming}:
                    self.direct.discard(reading)
                raise
            self.direct.write(buffer, extents)

    def _extents(self, tensors: AdamTensors, low: int, high: int) -> list[_Extent]:
        """Return where the states of entries low .. high - 1 are; `low` is a multiple of a tile."""
        start, found = self.start, []
        for state in (tensors.master, tensors.mean, tensors.square):
            size = state.element_size()
            end = min(high, state.numel())
            # A tile is a multiple of a page in every dtype; only the last one is padded.
            found.append((start + low * size, padded((end - low) * size, PAGE)))
            start += padded(state.numel() * size, PAGE)
        return found


def _in_buffer(tensors: AdamTensors, buffer: mmap.mmap, extents: Sequence[_Extent]) -> AdamTensors:
    """Return the same slice with its states in a buffer."""
    memory, at, found = torch.frombuffer(buffer, dtype=torch.uint8), 0, []
    for state, (_, size) in zip(
        (tensors.master, tensors.mean, tensors.square), extents, strict=True
    ):
        used: Tensor = memory[at : at + state.numel() * state.element_size()]
        # Views of the buffer: the kernel computes in place, and the buffer is written back.
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
    """Open a file a second time, with O_DIRECT.

    Args:
        file: Descriptor of the file, whose first page holds zeros.
        mapped: The same file, mapped.

    Returns:
        The descriptor; None where that is not possible, or not safe, see Note [Two ways].
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        # The file has no name any more; the system still offers it here.
        # A second open file of the same inode; flags of a descriptor cannot be added later.
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
    """Whether the map and O_DIRECT each show what was written through the other; leaves zeros."""
    page = mmap.mmap(-1, PAGE)
    # One way writes, the other reads, in both directions: a file system may keep two caches.
    mapped[:PAGE] = b"\1" * PAGE
    mapped.flush(0, PAGE)
    seen = os.preadv(direct, [page], 0) == PAGE and page[:] == b"\1" * PAGE
    page[:] = bytes(PAGE)
    return seen and os.pwritev(direct, [page], 0) == PAGE and mapped[:PAGE] == bytes(PAGE)
