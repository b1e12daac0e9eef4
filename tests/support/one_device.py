"""A run on one device, under any strategy, precision and accelerator."""

from typing import Any

import lightning.pytorch as pl
import torch

import lightning_par  # noqa: F401 - registers the strategies
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import Recorder


def train_one(strategy: str, precision: Any, accelerator: str) -> tuple[list[float], Any]:
    """Return the loss of every step and the weights at the end."""
    recorder, module = Recorder(), ToyModule()
    pl.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    ).fit(module, loader(ToyData(8), 4), loader(ToyData(8), 4))
    weights = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    return recorder.losses, weights


def differences(precision: str, accelerator: str) -> list[str]:
    """Return the names of what differs in any bit between hybrid3d and a plain Trainer."""
    losses, weights = train_one("hybrid3d", precision, accelerator)
    wanted_losses, wanted = train_one("auto", precision, accelerator)
    found = [] if losses == wanted_losses else ["losses"]
    return found + [name for name in wanted if not torch.equal(weights[name], wanted[name])]
