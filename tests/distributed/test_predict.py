"""Predicting needs no labels, and replicas may have unequal numbers of batches."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_par import Hybrid3DStrategy
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.ranks.api import run_ranks


class Unlabelled(ToyData):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": super().__getitem__(index)["ids"]}


class Predictor(ToyModule):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["ids"]).argmax(-1)


def predict(rank: int, world: int, options: dict[str, Any]) -> int:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(**options),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = trainer.predict(Predictor(), loader(Unlabelled(9), 4))
    assert found is not None
    return sum(len(batch) for batch in found)


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 1}, [9, 9]),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, [9, 9]),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0}, [9, 9]),
    ],
    ids=["tp2", "pp2", "dp2"],
)
def test_predictions_need_no_labels(options: dict[str, Any], samples: list[int]) -> None:
    assert run_ranks(predict, 2, options, timeout=60) == samples


def evaluate(rank: int, world: int) -> bool:
    """Run a sharded forward in inference mode, as Lightning evaluates on CUDA, then train."""
    module = ToyModule("sgd")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            zero_stage=3,
            gather_after_run=False,
        ),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(ToyData(8), 4))
    sharding = trainer.strategy.parallel_model.sharding
    ids = ToyData(4).ids[:, :-1]
    with torch.inference_mode():
        logits = sharding.call(lambda: module.model(ids))
    sharding.release()
    return bool(logits.isfinite().all())


def test_a_sharded_model_runs_in_inference_mode() -> None:
    assert run_ranks(evaluate, 2, timeout=60) == [True, True]
