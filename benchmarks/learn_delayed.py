"""Learning on real text with the optimizer on the device, on the host, and with delayed updates.

The same tiny GPT reads the same bytes (the sources of Python's standard library) in the same order.
"""

import argparse
import logging
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_par import Hybrid3DStrategy, ZeROOffloadStrategy
from lightning_par.models import GPTModule, TextDataModule


class _Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def learn(strategy: Any, steps: int) -> tuple[list[float], float]:
    """Return the loss of every step and that of held-out batches at the end."""
    pl.seed_everything(0, verbose=False)
    losses = _Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=16,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(
        GPTModule("tiny", max_steps=steps, warmup_steps=20),
        TextDataModule(length=128, batch_size=8),
    )
    return losses.values, float(trainer.callback_metrics["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    half = options.steps // 2
    contenders = {
        "on the device": Hybrid3DStrategy(),
        "offloaded": ZeROOffloadStrategy(),
        f"delayed from step {half // 2}": ZeROOffloadStrategy(delayed_update=half // 2),
        "delayed from step 0": ZeROOffloadStrategy(delayed_update=0),
    }
    print(f"{'mean loss of 20 steps ending at':<32}{half:>8}{options.steps:>8}     val")
    for name, strategy in contenders.items():
        values, validated = learn(strategy, options.steps)
        means = [statistics.mean(values[end - 20 : end]) for end in (half, options.steps)]
        print(f"{name:<32}{means[0]:8.3f}{means[1]:8.3f}{validated:8.3f}", flush=True)


if __name__ == "__main__":
    main()
