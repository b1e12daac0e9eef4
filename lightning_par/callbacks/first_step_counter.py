"""Counting what every step of a kind needs, in the first of that kind."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_par.engine.batch import signature

__all__ = ["FirstStepCounter", "gather_numbers"]

T = TypeVar("T")


class FirstStepCounter(Callback, Generic[T]):
    """Base of the callbacks that count something in the first step of every batch shape.

    That step runs without `torch.compile`, since neither operators nor what they save can be seen
    in compiled code.
    """

    def __init__(self) -> None:
        self._counted: dict[Hashable, T] = {}
        self._kind: Hashable = None
        self._open: ExitStack | None = None

    def counter(self) -> AbstractContextManager[T]:
        """Return what is entered while forward and backward run."""
        raise NotImplementedError

    @property
    def counted(self) -> T:
        """What was counted in a step of the kind of the last one."""
        return self._counted[self._kind]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._kind = signature(batch)
        if self._kind not in self._counted:
            self._open = ExitStack()
            torch.compiler.set_stance("force_eager")
            self._open.callback(torch.compiler.set_stance, "default")
            self._counted[self._kind] = self._open.enter_context(self.counter())

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._stop()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._stop()

    @override
    def on_exception(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def gather_numbers(numbers: list[float], device: torch.device) -> Tensor:
    """Return the numbers of every rank, [ranks, len(numbers)], in float64 on the CPU.

    Args:
        numbers: As many on every rank.
        device: Of this rank.

    **Communicates**: one all-gather of the numbers over all ranks.
    """
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine.cpu().unsqueeze(0)
    found = mine.new_empty(dist.get_world_size() * len(numbers))
    dist.all_gather([*found.chunk(dist.get_world_size())], mine)
    return found.view(-1, len(numbers)).cpu()
