"""Learning curves: the same tiny GPT reads the same bytes (the sources of Python's standard
library) in the same order.
"""

import logging
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_par.models import GPTModule, TextDataModule

__all__ = ["Losses", "make_trainer", "print_curves", "quiet"]


class Losses(Callback):
    """Keeps the loss of every step, which is that of all replicas."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def quiet() -> None:
    """Say nothing but what is measured, and compute with one thread."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def make_trainer(steps: int, **options: Any) -> pl.Trainer:
    """Return one that trains on the CPU, validates at the end, and does nothing else.

    Args:
        steps: Of the optimizer.
        **options: More for `Trainer`.
    """
    return pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=16,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def print_curves(
    contenders: Mapping[str, Callable[[], Any]], steps: int, *, batch_size: int, devices: int = 1
) -> None:
    """Train once with each strategy; on rank 0, print mean losses and that of held-out batches.

    Args:
        contenders: Strategies by name.
        steps: Of the optimizer.
        batch_size: Of a replica.
        devices: Ranks; each has to call.
    """
    quiet()
    half = steps // 2
    _print(f"{'mean loss of 20 steps ending at':<32}{half:>8}{steps:>8}     val")
    for name, make in contenders.items():
        values, validated = _learn(make(), steps, batch_size, devices)
        means = [statistics.mean(values[end - 20 : end]) for end in (half, steps)]
        _print(f"{name:<32}{means[0]:8.3f}{means[1]:8.3f}{validated:8.3f}")


def _print(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def _learn(strategy: Any, steps: int, batch_size: int, devices: int) -> tuple[list[float], float]:
    """Return the loss of every step and that of held-out batches at the end."""
    pl.seed_everything(0, verbose=False)
    losses = Losses()
    trainer = make_trainer(steps, devices=devices, strategy=strategy, callbacks=[losses])
    trainer.fit(
        GPTModule("tiny", max_steps=steps, warmup_steps=20),
        TextDataModule(length=128, batch_size=batch_size),
    )
    return losses.values, float(trainer.callback_metrics["val_loss"])
