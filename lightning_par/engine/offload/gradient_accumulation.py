"""Gradient accumulation on the host.

Every batch sends its gradients, and the device keeps none. The thread that computes updates adds
them, in the dtype of the master weights, while the backward goes on.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.offload.host_parameter import HostParameter
from lightning_par.engine.offload.update_worker import UpdateWorker

__all__ = ["HostSums"]


class HostSums:
    """Sums of the gradients of one step's batches.

    Args:
        worker: Adds, in order with the updates.
    """

    def __init__(self, worker: UpdateWorker) -> None:
        self._worker = worker
        self._memory: dict[tuple[HostParameter, int], Tensor] = {}
        self._totals: dict[HostParameter, Tensor] = {}
        self._running: list[Future[None]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, which are allocated when they are first needed."""
        return sum(t.numel() * t.element_size() for t in self._memory.values())

    def add(self, ready: Any, bucket: Iterable[HostParameter], slot: int) -> None:
        """Start to add the gradients in slots.

        Args:
            ready: Event after which they are on the host.
            bucket: Parameters of the gradients.
            slot: Index of the slots that hold them; they are free again after `wait`.
        """
        terms = []
        for held in bucket:
            # One sum per slot: a delayed update may still read the sum of the other one.
            place = held, slot
            if place not in self._memory:
                wide = held.master.dtype
                self._memory[place] = torch.empty_like(held.slots[slot], dtype=wide)
            # Decided here, in order: the worker adds later, when `_totals` may be those of the
            # next step.
            terms.append((self._memory[place], held.slots[slot], held in self._totals))
            self._totals[held] = self._memory[place]
        # In the worker's one thread, and so after updates that read the same slots.
        self._running.append(self._worker.run(ready, lambda: _add(terms)))

    def wait(self) -> None:
        """Wait until every gradient is added."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def take(self) -> dict[HostParameter, Tensor]:
        """Return the sums of this step, and start those of the next one."""
        self.wait()
        totals, self._totals = self._totals, {}
        return totals


@torch.no_grad()
def _add(terms: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
    """Add to each total its term; a first term overwrites what an earlier step left there."""
    for total, term, continues in terms:
        if continues:
            total.add_(term)
        else:
            total.copy_(term)
