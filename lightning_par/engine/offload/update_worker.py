"""The thread that updates buckets of parameters on the host, in the order in which they come."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.cpu_kernels import AdamKernel
from lightning_par.engine.offload.nvme import NvmeRange

__all__ = ["Update", "UpdateWorker"]

_GRAIN = 2**14
"""Entries below which a tensor is not divided among threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """One step of one parameter.

    Attributes:
        rule: Of its group, as it was when the step was asked for.
        tensors: Flat.
        step: Number of the parameter's step, from 1.
        pages: Where the states are, if that is a file.
    """

    rule: AdamRule
    tensors: AdamTensors
    step: int
    pages: NvmeRange | None = None


class UpdateWorker:
    """Runs updates in one thread, which divides large tensors among further ones.

    Args:
        kernel: Gives up the interpreter lock while it runs.
        threads: How many compute at the same time.
    """

    def __init__(self, kernel: AdamKernel, threads: int) -> None:
        self.kernel = kernel
        self._parts = 1 if kernel.is_parallel else threads
        self._waiting: deque[Sequence[Update]] = deque()
        self._thread = ThreadPoolExecutor(1, "offloaded-updates")
        self._more = ThreadPoolExecutor(self._parts - 1, "offload") if self._parts > 1 else None

    def submit(
        self, ready: Any, updates: Sequence[Update], scale: float, largest: float
    ) -> "Future[None]":
        """Update a bucket once its gradients are here.

        Args:
            ready: Event after which the gradients are on the host.
            updates: Of the bucket.
            scale: Factor of every gradient.
            largest: Bound of its entries.
        """
        self._waiting.append(updates)
        return self._thread.submit(self._run, ready, updates, scale, largest)

    def run(self, ready: Any, job: Callable[[], None]) -> "Future[None]":
        """Do something else, after what was submitted before.

        Args:
            ready: Event to wait for.
            job: What to do.
        """

        def wait_and_run() -> None:
            ready.synchronize()
            job()

        return self._thread.submit(wait_and_run)

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._thread.shutdown()
        if self._more is not None:
            self._more.shutdown()

    def _run(self, ready: Any, updates: Sequence[Update], scale: float, largest: float) -> None:
        self._waiting.popleft()
        ready.synchronize()
        following = self._waiting[0] if self._waiting else ()
        for update in following:
            if update.pages is not None:
                update.pages.announce()
        for update, after in zip_longest(updates, [*updates[1:], *following[:1]]):
            if after is not None and after.pages is not None:
                after.pages.fetch(after.tensors)
            self._visit(update, scale, largest)

    def _visit(self, update: Update, scale: float, largest: float) -> None:
        if update.pages is None:
            self._update(update, update.tensors, scale, largest)
            return
        with closing(update.pages.visit(update.tensors)) as parts:
            for tensors in parts:
                self._update(update, tensors, scale, largest)

    def _update(self, update: Update, tensors: AdamTensors, scale: float, largest: float) -> None:
        def part(tensors: AdamTensors) -> None:
            self.kernel(update.rule, tensors, step=update.step, scale=scale, largest=largest)

        entries = tensors.master.numel()
        if self._more is None or entries < 2 * _GRAIN:
            part(tensors)
            return
        # Whole vectors, so that no two threads write the same cache line.
        size = -(-entries // (self._parts * 64)) * 64
        first, *others = [
            tensors.part(low, min(low + size, entries)) for low in range(0, entries, size)
        ]
        running = [self._more.submit(part, tensors) for tensors in others]
        part(first)
        for future in running:
            future.result()
