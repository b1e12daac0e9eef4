"""On a CUDA device, hybrid3d on one device trains as a plain Trainer does."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_par  # noqa: F401 - registers the strategies
from tests.parity import Recorder
from tests.toy import loader, ToyData, ToyModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(strategy: str, precision: Any) -> tuple[list[float], dict[str, Any]]:
    recorder, module = Recorder(), ToyModule()
    pl.Trainer(
        accelerator="cuda",
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
    ).fit(module, loader(ToyData(8), 4))
    weights = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    return recorder.losses, weights


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_device_equals_a_plain_trainer_bit_for_bit(precision: str) -> None:
    losses, weights = train("hybrid3d", precision)
    wanted_losses, wanted = train("auto", precision)
    assert losses == wanted_losses
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_every_rank_of_a_world_of_one_is_on_the_device() -> None:
    module = ToyModule()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy="hybrid3d",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(ToyData(4), 4))
    assert {p.device.type for p in module.parameters()} == {"cuda"}
    state = trainer.strategy.lightning_module_state_dict()
    assert {value.device.type for value in state.values()} == {"cpu"}
