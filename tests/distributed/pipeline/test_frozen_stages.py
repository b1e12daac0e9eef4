"""Pipelines some of whose stages train nothing, as in fine-tuning a head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_par
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import compare_with_one_process, quiet_trainer, TOLERANCE
from tests.support.ranks.api import RankError, ranks, run_ranks

PP2: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
RUN: dict[str, Any] = {"batch_size": 4, "size": 12, "ignored": True}


@pytest.mark.parametrize(
    ("trains", "stage"), [("head", 1), ("norm", 1), ("embed", 0), ("blocks.0", 0)]
)
def test_stage_without_anything_to_train_equals_one_process(trains: str, stage: int) -> None:
    module = {"trains": trains, "tied": False}
    clipped = {"gradient_clip_val": 0.05}
    results, wanted = compare_with_one_process(
        "hybrid3d", PP2, 2, 1, **RUN, module=module, trainer=clipped
    )
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=0, atol=TOLERANCE)
        held = {name for name, grad in result["gradients"][0].items() if grad is not None}
        assert bool(held) == (rank == stage)
        assert set(result["states"]) == held
    moved = 0
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=TOLERANCE)
        moved += name.startswith(f"model.{trains}.")
    assert moved


def test_frozen_stages_of_replicas_equal_one_process() -> None:
    options = {**PP2, "zero_stage": 2}
    results, wanted = compare_with_one_process(
        "hybrid3d", options, 4, 2, **RUN, module={"trains": "head", "tied": False}
    )
    for result in results:
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=0, atol=TOLERANCE)
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=TOLERANCE)


def go_on(rank: int, world: int, source: Path | None, target: Path | None, steps: int) -> Any:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=world)
    trainer = quiet_trainer(
        strategy=strategy, devices=world, max_steps=steps, max_epochs=-1, precision="64-true"
    )
    module = ToyModule(trains="head", tied=False)
    trainer.fit(module, loader(ToyData(4), 4), loader(ToyData(4), 4), ckpt_path=source)
    if target is not None:
        trainer.save_checkpoint(target)
    return {name: w.clone() for name, w in strategy.gather_state_dict().items()}


def test_its_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    """From two stages to one and back; the stage without parameters brings no states."""
    whole = run_ranks(go_on, 1, None, None, 3)[0]
    for first, second in ((2, 1), (1, 2)):
        path = tmp_path / f"{first}.ckpt"
        run_ranks(go_on, first, None, path, 2)
        found = run_ranks(go_on, second, path, None, 3)[0]
        for name, weight in found.items():
            torch.testing.assert_close(weight, whole[name], rtol=0, atol=TOLERANCE)


class Unfreeze(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        pl_module.model.requires_grad_(index > 0)
        pl_module.model.head.requires_grad_(True)


def unfreeze(rank: int, world: int) -> None:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=world)
    trainer = quiet_trainer(
        strategy=strategy, devices=world, max_epochs=1, callbacks=[Unfreeze()], limit_val_batches=0
    )
    trainer.fit(ToyModule(trains="head", tied=False), loader(ToyData(12), 4))


def test_unfreezing_during_a_fit_is_refused() -> None:
    with pytest.raises(RankError, match="parameters were frozen or unfrozen within an epoch"):
        run_ranks(unfreeze, 2)


class Nothing(ToyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([], lr=1.0)


def train_nothing(rank: int, world: int) -> str:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=world)
    trainer = quiet_trainer(strategy=strategy, devices=world, max_epochs=1)
    with pytest.raises(ValueError, match=r"empty|has no parameter") as caught:
        trainer.fit(Nothing(), loader(ToyData(4), 4), loader(ToyData(4), 4))
    return str(caught.value)


def test_nothing_to_train_at_all_is_refused_on_every_rank() -> None:
    assert "empty parameter list" in run_ranks(train_nothing, 1)[0]
    for said in run_ranks(train_nothing, 2):
        assert "an optimizer that has no parameter of the LightningModule" in said


class NoOptimizer(ToyModule):
    def configure_optimizers(self) -> None:
        return None


@ranks(2)
def test_no_optimizer_at_all_is_allowed(rank: int, world: int) -> None:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=world)
    trainer = quiet_trainer(strategy=strategy, devices=world, max_epochs=1, limit_val_batches=0)
    trainer.fit(NoOptimizer(), loader(ToyData(4), 4))
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 1
