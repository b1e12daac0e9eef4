"""On a CUDA device, hybrid3d on one device trains as a plain Trainer does."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.one_device import differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_device_equals_a_plain_trainer_bit_for_bit(precision: str) -> None:
    assert differences(precision, "cuda") == []


def test_a_model_on_one_device_is_there_and_its_checkpoint_is_not() -> None:
    module, during = ToyModule(), set()
    look = LambdaCallback(
        on_train_end=lambda *_: during.update(p.device.type for p in module.parameters())
    )
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy="hybrid3d",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[look],
    )
    trainer.fit(module, loader(ToyData(4), 4), loader(ToyData(4), 4))
    assert during == {"cuda"}
    assert {p.device.type for p in module.parameters()} == {"cpu"}  # as after any Trainer
    states = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
    assert {value.device.type for value in states} == {"cpu"}
    state = trainer.strategy.gather_state_dict()
    assert {value.device.type for value in state.values()} == {"cpu"}
