"""What the Trainer does besides training: on every layout it works as on one device, or is refused
before anything starts. The page docs/trainer.md has the table.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
)
from lightning.pytorch.tuner import Tuner
from torch.utils.data import IterableDataset

import lightning_par
from lightning_par.errors import ConfigurationError
from tests.contract.subject import data, LAYOUTS, SEED, TalkativeModule
from tests.support.exhaustive import some
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.contract
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64


class Stream(IterableDataset[Any]):
    """Nobody knows how many samples it has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        samples = ToyData(self.size)
        return (samples[index] for index in range(self.size))


class Tunable(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer_of(layout: str, world: int, folder: Path, **options: Any) -> pl.Trainer:
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(SEED, verbose=False)
    chosen = {"precision": "64-true", "default_root_dir": folder, "devices": world, **options}
    if layout != "one":
        zero = {"zero_stage": 3} if layout == "dp2" else {}
        chosen["strategy"] = lightning_par.Hybrid3DStrategy(**LAYOUTS[layout], **zero)
    return quiet_trainer(**chosen)


def weights(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    state = getattr(trainer.strategy, "gather_state_dict", module.state_dict)()
    return {name: value.clone() for name, value in state.items() if name.startswith("model")}


def features(rank: int, world: int, layout: str, replicas: int, folder: Path) -> dict[str, Any]:
    """Run what is supported, one feature after the other."""
    schedule: list[Callback] = [GradientAccumulationScheduler({0: 1, 1: 2})]
    trainer = trainer_of(layout, world, folder, max_epochs=3, callbacks=schedule)
    module = TalkativeModule()
    trainer.fit(module, data(16, 4, replicas), data(8, 4, replicas))
    found = {"steps": [trainer.global_step], "accumulated": weights(trainer, module)}

    trainer = trainer_of(layout, world, folder, max_epochs=1)
    tunable = Tunable()
    held = loader(ToyData(16), 4)
    finder = Tuner(trainer).lr_find(
        tunable, data(64, 4, replicas), held, num_training=14, min_lr=1e-4, max_lr=0.5
    )
    found |= {"lr": [tunable.lr, finder.suggestion()], "lr_steps": len(finder.results["loss"])}

    trainer = trainer_of(layout, world, folder, max_epochs=2)
    module = TalkativeModule()
    trainer.fit(module, loader(Stream(9), 2), loader(Stream(6), 3))
    (tested,) = trainer.test(module, loader(Stream(5), 2), verbose=False)
    found |= {"streamed": weights(trainer, module), "tested": tested["test_loss"]}
    found["steps"].append(trainer.global_step)

    trainer = trainer_of(layout, world, folder, max_epochs=2)
    module = TalkativeModule()
    trainer.fit(module, loader(Stream(9 + 8 * rank), 2), loader(Stream(5 + 4 * rank), 2))
    found["steps"].append(trainer.global_step)
    return found


@pytest.mark.parametrize("layout", some(LAYOUTS, {"tp2"}))
def test_features_work_as_on_one_device(layout: str, tmp_path: Path) -> None:
    replicas = 2 if layout == "dp2" else 1
    (wanted,) = run_ranks(features, 1, "one", replicas % 2, tmp_path / "one")
    results = run_ranks(features, 2, layout, replicas, tmp_path / layout, timeout=120)
    assert wanted["steps"] == [8, 10, 10]
    assert wanted["lr_steps"] == 14
    for result in results:
        assert result["steps"] == wanted["steps"]
        assert result["lr_steps"] == 14
        torch.testing.assert_close(result["lr"], wanted["lr"], **EXACT)
        torch.testing.assert_close(result["tested"], wanted["tested"], **EXACT)
    for name in ("accumulated", "streamed"):
        torch.testing.assert_close(results[0][name], wanted[name], **EXACT)


def predict(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """Predict 9, 3 and 7 samples, and train after each."""
    strategy = lightning_par.Hybrid3DStrategy(**options, gather_after_run=False)
    trainer = quiet_trainer(devices=world, strategy=strategy, max_epochs=1)
    module = TalkativeModule(optimizer="sgd")
    found = []
    for size in (9, 3, 7):
        batches = trainer.predict(module, loader(ToyData(size), 2)) or []
        found.append([row for batch in batches for row in batch])
        trainer.fit(module, loader(ToyData(8), 4))
        assert all(hasattr(p, "to_local") for p in module.parameters())
    return found


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_sharded_replicas_predict_unequal_numbers_of_batches(pipeline: int) -> None:
    options = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": 2,
        "zero_stage": 3,
    }
    results = run_ranks(predict, 2 * pipeline, options, timeout=120)
    assert all([len(rows) for rows in found] == [9, 3, 7] for found in results)
    with torch.no_grad():
        logits = TalkativeModule().model(ToyData(9).ids[:, :-1])
    assert all(torch.equal(torch.stack(found[0]), logits.argmax(-1)) for found in results)


REFUSED: dict[str, tuple[Callback, str]] = {
    "batch-size finder": (
        BatchSizeFinder(),
        r"not supported on tp 2: .*until one rank is out of memory.* lightning-par rehearse prints",
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_unsupported_feature_is_refused_before_anything_starts(feature: str) -> None:
    callback, says = REFUSED[feature]
    strategy = lightning_par.Hybrid3DStrategy(**LAYOUTS["tp2"])
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[callback])
    with pytest.raises(ConfigurationError, match=says):
        trainer.fit(ToyModule(), loader(ToyData(4), 2))
