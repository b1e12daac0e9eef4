"""Gradients of several batches, added up on the host.

Every batch sends its gradients; the device keeps none of them. They are added in the wide dtype,
by the thread that computes updates, while the backward goes on.
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
    """Adds up the gradients of one step.

    Args:
        worker: Adds in its turn.
    """

    def __init__(self, worker: UpdateWorker) -> None:
        self._worker = worker
        self._memory: dict[tuple[HostParameter, int], Tensor] = {}
        self._totals: dict[HostParameter, Tensor] = {}
        self._running: list[Future[None]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that have been needed."""
        return sum(t.numel() * t.element_size() for t in self._memory.values())

    def add(self, ready: Any, bucket: Iterable[HostParameter], slot: int) -> None:
        """Add what arrives in slots.

        Args:
            ready: Event after which it is there.
            bucket: Whose it is.
            slot: Which one; free again after `settle`.
        """
        terms = []
        for held in bucket:
            place = held, slot
            if place not in self._memory:
                wide = held.master.dtype
                self._memory[place] = torch.empty_like(held.slots[slot], dtype=wide)
            terms.append((self._memory[place], held.slots[slot], held in self._totals))
            self._totals[held] = self._memory[place]
        self._running.append(self._worker.run(ready, lambda: _add(terms)))

    def settle(self) -> None:
        """Wait until everything is added."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def take(self) -> dict[HostParameter, Tensor]:
        """Return the sums of this step, and begin anew."""
        self.settle()
        totals, self._totals = self._totals, {}
        return totals


@torch.no_grad()
def _add(terms: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
    for total, term, continues in terms:
        if continues:
            total.add_(term)
        else:
            total.copy_(term)
