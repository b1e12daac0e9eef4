"""A batch without a single label that counts gives no gradient, and is no error."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_par import Hybrid3DStrategy
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.ranks.api import run_ranks


class NoLabels(ToyData):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "labels": torch.full_like(sample["labels"], -100)}


def train(rank: int, world: int, options: dict[str, Any]) -> bool:
    module = ToyModule("sgd")
    before = ToyModule("sgd").model.norm.weight.clone()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(**options),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(NoLabels(8), 4))
    state = trainer.strategy.gather_state_dict()
    return rank > 0 or torch.equal(state["model.norm.weight"], before)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        {"tensor_parallel_size": 2},
    ],
    ids=["pp2", "dp2", "tp2"],
)
def test_a_batch_without_labels_leaves_the_weights(options: dict[str, Any]) -> None:
    assert run_ranks(train, 2, options, timeout=120) == [True, True]
