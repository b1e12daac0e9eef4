"""Optimizer states in a file: mapped, as the product does it, or read and written past the cache.

Both take one Adam step of all states, bucket by bucket, with the native kernel in one thread, and
look one bucket ahead. *mapped* leaves reading and writing to the system; *behind* asks it, beside
that, to begin writing a bucket as soon as that is updated. *direct* opens the file with O_DIRECT
and has a thread that reads the next bucket and one that writes the last one. *memory* has no file.
The bits are compared at the end.

Two regimes. *cached*: one step follows another, as where the host has memory to spare; the system
may write later. *cold*: nothing is cached before a step, and the step ends when everything is on
the disk, as where states are much larger than the memory: every byte is read and written once.
"""

import argparse
import ctypes
import fcntl
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn, Tensor

from lightning_par.engine.offload.adam import AdamKernel, AdamRule, AdamTensors, choose_kernel
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.parameters import HostParameter
from lightning_par.engine.offload.storage import allocate
from lightning_par.engine.offload.worker import UpdateWorker

ENTRIES = 2**20
"""Of a parameter: 12 MiB of states."""
RULE = AdamRule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
CPU = torch.device("cpu")


class _Now:
    """Gradients that are here already."""

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to hold states.

    Attributes:
        step: Takes one step of everything.
        file: Descriptor of the states; None: in memory.
        masters: Gives the masters of the first bucket.
    """

    step: Callable[[], None]
    file: int | None
    masters: Callable[[], Tensor]

    def clean(self) -> None:
        """Leave nothing of the file in memory."""
        if self.file is not None:
            os.fsync(self.file)
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def complete(self) -> None:
        """Wait until everything is on the disk."""
        if self.file is not None:
            os.fsync(self.file)


def gradients(count: int) -> list[Tensor]:
    """Return what the slots of `count` parameters hold."""
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(ENTRIES, generator=generator).bfloat16()
    return [one.clone() for _ in range(count)]


def opened_in(folder: Path) -> int | None:
    """Return the highest descriptor of a nameless file in a folder: of the one made last."""
    found: int | None = None
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
        except OSError:
            continue
        if str(target).startswith(f"{folder}/"):
            found = max(found or 0, int(link.name))
    return found


def begin_writing(file: int, start: int, size: int) -> None:
    """Ask the system to write a part of a file, without waiting until that is done."""
    write_out = 2  # SYNC_FILE_RANGE_WRITE
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(size), write_out)
    assert not failed, os.strerror(ctypes.get_errno())


def mapped(
    count: int,
    per_bucket: int,
    folder: Path | None,
    kernel: AdamKernel,
    *,
    behind: bool = False,
) -> Contender:
    """Return what the product does, with a file or without."""
    place: Any = True if folder is None else f"nvme:{folder}"
    options = OffloadOptions(offload_optimizer=place)
    parameters = [nn.Parameter(torch.zeros(ENTRIES, dtype=torch.bfloat16)) for _ in range(count)]
    held, _storage = allocate(parameters, options, CPU)
    parts = list(held.values())
    for part, grad in zip(parts, gradients(count), strict=True):
        part.slots[0].copy_(grad)
    worker = UpdateWorker(kernel, 1)
    buckets = [parts[low : low + per_bucket] for low in range(0, count, per_bucket)]
    file, writer = None if folder is None else opened_in(folder), ThreadPoolExecutor(1)

    def write(bucket: Sequence[HostParameter]) -> None:
        first, last = bucket[0].pages, bucket[-1].pages
        assert file is not None
        assert first is not None
        assert last is not None
        begin_writing(file, first.start, last.start + last.size - first.start)

    def step() -> None:
        futures = [
            worker.submit(_Now(), [part.update(RULE, 0) for part in bucket], 1.0, float("inf"))
            for bucket in buckets
        ]
        writing = []
        for bucket, future in zip(buckets, futures, strict=True):
            future.result()
            if behind:
                writing.append(writer.submit(write, bucket))
        for future in writing:
            future.result()

    return Contender(
        step=step, file=file, masters=lambda: torch.cat([p.master for p in buckets[0]])
    )


class DirectFile:
    """States of buckets in a file that bypasses the page cache.

    Args:
        folder: Of the file.
        count: Parameters, of whole buckets.
        per_bucket: Parameters of a bucket.
        kernel: Of the updates.
    """

    def __init__(self, folder: Path, count: int, per_bucket: int, kernel: AdamKernel) -> None:
        self.kernel, self.count, self.per_bucket = kernel, count, per_bucket
        size = 12 * ENTRIES * per_bucket
        self.buckets = count // per_bucket
        with tempfile.NamedTemporaryFile(dir=folder) as named:
            self.file = os.open(named.name, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self.file, 0, size * self.buckets)
        # One that is read, one that is computed with, one that is written; whole pages.
        self.memory = [mmap.mmap(-1, size) for _ in range(3)]
        self.states = [torch.frombuffer(m, dtype=torch.float32) for m in self.memory]
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.slots, self.steps, self.size = gradients(count), 0, size

    def read(self, bucket: int) -> None:
        """Read a bucket into its memory."""
        done = os.preadv(self.file, [self.memory[bucket % 3]], bucket * self.size)
        assert done == self.size, done

    def write(self, bucket: int) -> None:
        """Write a bucket out of its memory."""
        done = os.pwritev(self.file, [self.memory[bucket % 3]], bucket * self.size)
        assert done == self.size, done

    def step(self) -> None:
        """Take one step of everything."""
        self.steps += 1
        reading = self.reader.submit(self.read, 0)
        written: list[Future[None]] = []
        for bucket in range(self.buckets):
            reading.result()
            if bucket + 1 < self.buckets:
                if bucket >= 2:  # whose memory is needed
                    written[bucket - 2].result()
                reading = self.reader.submit(self.read, bucket + 1)
            self.compute(bucket)
            written.append(self.writer.submit(self.write, bucket))
        for future in written:
            future.result()

    def compute(self, bucket: int) -> None:
        """Update the parameters of a bucket that is in memory."""
        first = bucket * self.per_bucket
        states = self.states[bucket % 3].view(self.per_bucket, 3, ENTRIES)
        for row, slot in zip(states, self.slots[first : first + self.per_bucket], strict=True):
            master, mean, square = row
            tensors = AdamTensors(master=master, mean=mean, square=square, grad=slot, out=slot)
            self.kernel(RULE, tensors, step=self.steps)

    def masters(self) -> Tensor:
        """Return the masters of the first bucket."""
        self.read(0)
        return self.states[0].view(self.per_bucket, 3, ENTRIES)[:, 0].flatten().clone()


def direct(count: int, per_bucket: int, folder: Path, kernel: AdamKernel) -> Contender:
    """Return the other way."""
    file = DirectFile(folder, count, per_bucket, kernel)
    assert fcntl.fcntl(file.file, fcntl.F_GETFL) & os.O_DIRECT
    return Contender(step=file.step, file=file.file, masters=file.masters)


def read_from_disk() -> int:
    """Return the bytes that this process has read from a disk so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def measure(contender: Contender, *, cold: bool) -> tuple[float, int]:
    """Return seconds of a step, and the bytes that it read from the disk."""
    if cold:
        contender.clean()
    before, began = read_from_disk(), time.perf_counter()
    contender.step()
    if cold:
        contender.complete()
    return time.perf_counter() - began, read_from_disk() - before


def report(title: str, found: dict[str, list[tuple[float, int]]]) -> None:
    """Print the rows of one regime."""
    print(title)
    reference = [seconds for seconds, _ in found["mapped"]]
    for name, row in found.items():
        ratios = sorted(t / r for (t, _), r in zip(row, reference, strict=True))
        quarter = len(ratios) // 4
        print(
            f"  {name:<8}{statistics.median(t for t, _ in row):8.2f} s a step   "
            f"{statistics.median(ratios):.2f} x mapped "
            f"({ratios[quarter]:.2f}..{ratios[-1 - quarter]:.2f}, "
            f"range {ratios[0]:.2f}..{ratios[-1]:.2f})   "
            f"read {statistics.median(b for _, b in row) / 2**30:.2f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.25, help="of states")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=32, help="of gradients")
    parser.add_argument("--folder", type=Path, help="on the disk; by default a temporary one")
    options = parser.parse_args()
    per_bucket = max(1, options.bucket_mib * 2**20 // (2 * ENTRIES))
    buckets = max(3, round(options.gib * 2**30 / (12 * ENTRIES * per_bucket)))
    count = buckets * per_bucket
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        kernel = choose_kernel("native", folder / "kernel")
        contenders = {
            "mapped": mapped(count, per_bucket, folder, kernel),
            "behind": mapped(count, per_bucket, folder, kernel, behind=True),
            "direct": direct(count, per_bucket, folder, kernel),
            "memory": mapped(count, per_bucket, None, kernel),
        }
        print(
            f"{count * 12 * ENTRIES / 2**30:.2f} GiB of states in {count} parameters, "
            f"{buckets} buckets; {options.rounds} rounds"
        )
        for cold in (False, True):
            found: dict[str, list[tuple[float, int]]] = {name: [] for name in contenders}
            for number in range(options.rounds + 1):
                for name, contender in contenders.items():
                    result = measure(contender, cold=cold)
                    if number:
                        found[name].append(result)
            report("cold" if cold else "cached", found)
        one, *others = (contender.masters() for contender in contenders.values())
        assert all(torch.equal(one, other) for other in others), "the contenders differ"
        print("all hold the same bits")


if __name__ == "__main__":
    main()
