"""The thread that computes updates on the host, in the order in which they are submitted."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.cpu_kernels import AdamKernel
from lightning_par.engine.offload.nvme import NvmeRange

__all__ = ["Update", "UpdateWorker"]

_GRAIN = 2**14
"""Fewest entries that are worth a thread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """One Adam step of one parameter.

    Attributes:
        rule: Hyperparameters, as they were when the step was requested.
        tensors: Master weight, moments, gradient and output, flat.
        step: Number of the parameter's step, from 1.
        nvme: Range of the file that holds the states; None: they are in memory.
    """

    rule: AdamRule
    tensors: AdamTensors
    step: int
    nvme: NvmeRange | None = None


class UpdateWorker:
    """Runs updates in one thread, which splits large tensors over a pool of others.

    Args:
        kernel: The CPU kernel; it releases the interpreter lock while it runs.
        threads: Number of threads that compute at the same time.
        device: Device whose events are waited for; None: there is none but the host.
    """

    def __init__(
        self, kernel: AdamKernel, threads: int, device: torch.device | None = None
    ) -> None:
        self.kernel = kernel
        # torch's kernel has threads of its own: more of ours would compete with them.
        self._parts = 1 if kernel.is_parallel else threads
        self._waiting: deque[Sequence[Update]] = deque()
        # A new thread has the first device of the host as its own, and what waits there for another
        # one's events makes a context on it, which takes its memory once for every rank.
        here = torch.device("cpu") if device is None else device
        use = partial(torch.get_device_module(here).set_device, here)
        self._thread = ThreadPoolExecutor(1, "offloaded-updates", initializer=use)
        self._more = ThreadPoolExecutor(self._parts - 1, "offload") if self._parts > 1 else None

    def submit(
        self, ready: Any, updates: Sequence[Update], scale: float, largest: float
    ) -> "Future[None]":
        """Update a bucket of parameters once its gradients are on the host.

        Args:
            ready: Event after which they are.
            updates: One update for each parameter of the bucket.
            scale: Factor of every gradient.
            largest: Largest absolute value of a scaled gradient; entries beyond are clamped.
        """
        # In the order of submission, which `_run` reads ahead in.
        self._waiting.append(updates)
        return self._thread.submit(self._run, ready, updates, scale, largest)

    def run(self, ready: Any, job: Callable[[], None]) -> "Future[None]":
        """Run a function in the same thread, after all that was submitted before.

        Args:
            ready: Event to wait for first.
            job: The function.
        """

        def wait_and_run() -> None:
            ready.synchronize()
            job()

        return self._thread.submit(wait_and_run)

    def close(self) -> None:
        """Finish all that was submitted, and stop the threads."""
        self._thread.shutdown()
        if self._more is not None:
            self._more.shutdown()

    def _run(self, ready: Any, updates: Sequence[Update], scale: float, largest: float) -> None:
        self._waiting.popleft()
        ready.synchronize()
        # Read ahead, so that the disk works while a kernel does: through the map a bucket ahead,
        # with O_DIRECT one parameter, which is all that its few buffers hold.
        # The bucket after this one, if it has been submitted already.
        following = self._waiting[0] if self._waiting else ()
        for update in following:
            if update.nvme is not None:
                update.nvme.will_need()
        for update, after in zip_longest(updates, [*updates[1:], *following[:1]]):
            if after is not None and after.nvme is not None:
                after.nvme.prefetch(after.tensors)
            self._run_update(update, scale, largest)

    def _run_update(self, update: Update, scale: float, largest: float) -> None:
        if update.nvme is None:
            self._step(update, update.tensors, scale, largest)
            return
        # Closing returns the buffers at once if the kernel raises.
        with closing(update.nvme.tiles(update.tensors)) as tiles:
            for tensors in tiles:
                self._step(update, tensors, scale, largest)

    def _step(self, update: Update, tensors: AdamTensors, scale: float, largest: float) -> None:
        def part(tensors: AdamTensors) -> None:
            self.kernel(update.rule, tensors, step=update.step, scale=scale, largest=largest)

        entries = tensors.master.numel()
        if self._more is None or entries < 2 * _GRAIN:
            part(tensors)
            return
        # Multiples of a cache line in every dtype, so that no two threads write the same one.
        size = -(-entries // (self._parts * 64)) * 64
        first, *others = [
            tensors.part(low, min(low + size, entries)) for low in range(0, entries, size)
        ]
        # This thread computes a part, too: with one more, the pool would exceed `threads`.
        running = [self._more.submit(part, tensors) for tensors in others]
        part(first)
        for future in running:
            future.result()
