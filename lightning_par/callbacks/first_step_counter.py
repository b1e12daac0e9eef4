"""Base of callbacks that count something in the first step of every batch shape."""

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
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["FirstStepCounter", "gather_numbers"]

T = TypeVar("T")


class FirstStepCounter(Callback, Generic[T]):
    """Base of callbacks that count FLOPs or bytes in the first step of every batch shape.

    Later steps of the same shape need the same. The counted step runs without `torch.compile`,
    since dispatch modes and saved-tensor hooks do not see inside compiled code.
    """

    def __init__(self) -> None:
        self._counters: dict[Hashable, T] = {}
        self._signature: Hashable = None
        self._counting: ExitStack | None = None

    def counter(self) -> AbstractContextManager[T]:
        """Return a new counter, a context manager around a forward and its backward."""
        raise NotImplementedError

    @property
    def counted(self) -> T:
        """Counter of the first step with the batch shape of the last step."""
        return self._counters[self._signature]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._signature = signature(batch)
        if self._signature not in self._counters:
            self._start_counting()
            if isinstance(trainer.strategy, MeshStrategy):
                trainer.strategy.start.after_look[id(self)] = self._restart_counting

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._stop_counting()  # the optimizer's own operators are no part of the model

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._stop_counting()  # a batch that only accumulates has no optimizer step

    @override
    def on_exception(self, *_: Any) -> None:
        self._stop_counting()

    def _start_counting(self) -> None:
        self._counting = ExitStack()
        torch.compiler.set_stance("force_eager")
        self._counting.callback(torch.compiler.set_stance, "default")
        self._counters[self._signature] = self._counting.enter_context(self.counter())

    def _restart_counting(self) -> None:
        """Forget what the first look at the step has added."""
        if self._counting is not None:
            self._stop_counting()
            self._start_counting()

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()
            self._counting = None


def gather_numbers(numbers: list[float], device: torch.device) -> Tensor:
    """All-gather a few numbers over all ranks.

    Args:
        numbers: N numbers, the same N on every rank.
        device: Device of this rank, for the collective.

    Returns:
        [ranks, N], float64, on the CPU; the same on every rank.

    **Communicates**: one all-gather of N float64 over the world.
    """
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine.cpu().unsqueeze(0)
    found = mine.new_empty(dist.get_world_size() * len(numbers))
    dist.all_gather([*found.chunk(dist.get_world_size())], mine)
    return found.view(-1, len(numbers)).cpu()
