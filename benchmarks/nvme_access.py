"""Optimizer states in a file: past the cache of the system, as the product does it where it can, or
through a map of the file.

Each takes one Adam step of all states, bucket by bucket, with the native kernel in one thread.
*memory* has no file. The bits are compared at the end.

Two regimes. *cached*: one step follows another, as where the host has memory to spare; the system
may write later. *cold*: nothing is cached before a step, and the step ends when everything is on
the disk, as where states are much larger than the memory: every byte is read and written once.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn, Tensor

from lightning_par.engine.offload import host_storage
from lightning_par.engine.offload.adam import AdamRule
from lightning_par.engine.offload.cpu_kernels import AdamKernel, choose_kernel
from lightning_par.engine.offload.nvme import DirectNvmeRange, open_direct
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker

ENTRIES = 2**20
"""Of a parameter: 12 MiB of states."""
RULE = AdamRule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to hold states.

    Attributes:
        step: Takes one step of everything.
        file: Descriptor of the states; None: in memory.
        masters: Gives some masters.
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


def contender(
    count: int, per_bucket: int, folder: Path | None, kernel: AdamKernel, *, direct: bool = False
) -> Contender:
    """Return what the product does: in memory, through the map, or past the cache."""
    files: list[int] = []

    def opened(file: int, mapped: Any) -> int | None:
        files.append(os.dup(file))
        return open_direct(file, mapped) if direct else None

    host_storage.open_direct = opened
    place: Any = True if folder is None else f"nvme:{folder}"
    parameters = [nn.Parameter(torch.zeros(ENTRIES, dtype=torch.bfloat16)) for _ in range(count)]
    options = OffloadOptions(offload_optimizer=place)
    held, states = host_storage.allocate(parameters, options, torch.device("cpu"))
    parts = list(held.values())
    assert direct == isinstance(parts[0].nvme, DirectNvmeRange), "this disk has no O_DIRECT"
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(ENTRIES, generator=generator).bfloat16()
    for part in parts:
        part.slots[0].copy_(grad)
    worker = UpdateWorker(kernel, 1)
    buckets = [parts[low : low + per_bucket] for low in range(0, count, per_bucket)]

    def step() -> None:
        futures = [
            worker.submit(
                torch.cpu.Event(), [part.next_update(RULE, 0) for part in bucket], 1.0, float("inf")
            )
            for bucket in buckets
        ]
        for future in futures:
            future.result()
        states.wait_for_writes()

    return Contender(
        step=step,
        file=files[0] if files else None,
        masters=lambda: torch.cat([p.master for p in buckets[0]]),
    )


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
            "mapped": contender(count, per_bucket, folder, kernel),
            "direct": contender(count, per_bucket, folder, kernel, direct=True),
            "memory": contender(count, per_bucket, None, kernel),
        }
        print(
            f"{count * 12 * ENTRIES / 2**30:.2f} GiB of states in {count} parameters, "
            f"{buckets} buckets; {options.rounds} rounds"
        )
        for cold in (False, True):
            found: dict[str, list[tuple[float, int]]] = {name: [] for name in contenders}
            for number in range(options.rounds + 1):
                for name, held in contenders.items():
                    result = measure(held, cold=cold)
                    if number:
                        found[name].append(result)
            report("cold" if cold else "cached", found)
        one, *others = (held.masters() for held in contenders.values())
        assert all(torch.equal(one, other) for other in others), "the contenders differ"
        print("all hold the same bits")


if __name__ == "__main__":
    main()
