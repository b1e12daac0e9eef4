"""Runs with the optimizer on the host, and what was seen of it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

import lightning_par
from tests.support.parity import own_parameters, Result, train
from tests.support.ranks.api import run_ranks

KINDS = {
    "zero_offload": lightning_par.ZeROOffloadStrategy,
    "hybrid3d": lightning_par.Hybrid3DStrategy,
}


class HostDiary(Callback):
    """Writes down what the host holds and did, and every weight after every step."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.weights: list[list[torch.Tensor]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        parameters = [p.detach() for p in own_parameters(pl_module).values()]
        self.weights.append(
            [(p.to_local() if isinstance(p, DTensor) else p).clone().cpu() for p in parameters]
        )

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        host = trainer.strategy.parallel_model.host
        metrics = trainer.callback_metrics
        self.seen = {"logged": {k: float(v) for k, v in metrics.items() if "precision" in k}}
        if host is None:
            return
        self.seen |= {
            "kernel": host._worker.kernel.name,
            "early": host.early_updates,
            "host_bytes": host.host_bytes(),
            "parameters": sum(
                (p.to_local() if isinstance(p, DTensor) else p).numel()
                for p in own_parameters(pl_module).values()
            ),
        }


def train_offloaded(
    rank: int,
    world: int,
    strategy: str,
    options: dict[str, Any],
    run: dict[str, Any],
    callbacks: Callable[[], list[Callback]] = list,
) -> Result:
    """Run `tests.support.parity.train` on one rank."""
    diary = HostDiary()
    kind = KINDS[strategy]
    result = train(kind(**options), devices=world, callbacks=[diary, *callbacks()], **run)
    return {**result, **diary.seen, "steps": diary.weights}


def run_offloaded(
    strategy: str, options: dict[str, Any], world: int, run: dict[str, Any], **more: Any
) -> list[Result]:
    """Run `train_offloaded` on `world` ranks."""
    return run_ranks(train_offloaded, world, strategy, options, run, timeout=120, **more)


def same_weights(one: Result, two: Result) -> bool:
    """Whether all weights at the end are equal, bit for bit."""
    return all(torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"])
