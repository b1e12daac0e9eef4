"""Validation, test and prediction are proved: equal batches pass, others end the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_par import Hybrid3DStrategy
from lightning_par.errors import VerificationError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS, world_of


def _on_mesh() -> bool:
    return dist.is_initialized()


class Evaluated(ToyModule):
    """Logs, returns and counts what hooks and steps before have changed."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("sgd")
        self.fault, self.started, self.kept = fault, 0, list[float]()
        self.mean = MeanMetric()

    def on_validation_start(self) -> None:
        self.started += 1

    def _evaluate(self, batch: Any, name: str) -> Tensor:
        loss = self.loss(batch) * (1 + self.started)
        if self.fault == "draws":
            loss = loss + torch.rand(2 if _on_mesh() else 1)[-1]
        logged = loss
        if self.fault == name and _on_mesh():
            logged = loss + 1
        self.mean.update(logged.detach(), 1 if self.fault == "unweighted" else len(batch["ids"]))
        self.kept.append(float(loss.detach()))
        self.log(f"{name}_loss", logged, sync_dist=True)
        self.log(name, self.mean)
        return logged

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self._evaluate(batch, "val"), "ids": batch["ids"]}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        made = self.model(batch["ids"])
        return made + 1 if self.fault == "predict" and _on_mesh() else made


def _run(
    rank: int, world: int, layout: str, loops: list[str], fault: str = "", **options: Any
) -> tuple[dict[str, str], str]:
    module = Evaluated(fault)
    precision = options.pop("precision", "64-true")
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=options.pop("verify", "auto"))
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision=precision,
        proves=True,
        max_steps=2,
        **options,
    )
    data = loader(ToyData(12, ignored=fault == "unweighted"), 2)
    found: dict[str, str] = {}
    error = ""
    for loop in loops:
        given = [data, [data, loader(ToyData(8), 2)]] if loop == "fit" else [data]
        try:
            getattr(trainer, loop)(module, *given)
        except VerificationError as raised:
            error = str(raised)
            break
        finally:
            found |= trainer.strategy.start.proof.outcomes
    return found, error


_OF_REPLICAS = (
    "in part: numbers that it returns are not compared, since they are computed from the samples "
    "of one replica"
)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "cp2"])
def test_loops_of_their_own_are_equal(layout: str) -> None:
    loops = ["validate", "test", "predict"]
    found = run_ranks(_run, world_of(layout), layout, loops, timeout=120)
    assert [error for _, error in found] == [""] * len(found)
    outcomes = found[0][0]
    first = {name.removeprefix("first batch of "): said for name, said in outcomes.items()}
    replicas = layout == "zero3"
    own = _OF_REPLICAS if replicas else "equal"
    assert first == {
        "validation_step": own,
        "test_step": own,
        "predict_step": "not proved: replicas may have different numbers of batches to predict"
        if replicas
        else "equal",
    }


@pytest.mark.parametrize("sanity", [2, 0])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "cp2"])
def test_validation_of_a_fit_is_equal_for_each_loader(layout: str, sanity: int) -> None:
    options = {"num_sanity_val_steps": sanity, "val_check_interval": 1}
    found = run_ranks(_run, world_of(layout), layout, ["fit"], timeout=120, **options)
    assert [error for _, error in found] == [""] * len(found)
    own = _OF_REPLICAS if layout == "zero3" else "equal"
    wanted = {
        "first batch of validation_step, loader 0": own,
        "first batch of validation_step, loader 1": own,
        "training step 0": "equal",
    }
    assert found[0][0] == wanted


@pytest.mark.parametrize(
    ("loop", "fault", "layout", "said"),
    [
        ("validate", "val", "tp2", "the logged 'val_loss' is"),
        ("validate", "val", "zero3", "the logged 'val_loss' is"),
        ("fit", "val", "pp2", "the logged 'val_loss' is"),
        ("test", "test", "pp2", "the logged 'test_loss' is"),
        ("predict", "predict", "tp2", "what the step returns has the norm"),
    ],
)
def test_a_difference_ends_the_run_on_every_rank(
    loop: str, fault: str, layout: str, said: str
) -> None:
    found = run_ranks(_run, world_of(layout), layout, [loop], fault, timeout=120)
    step = {"fit": "validation_step, loader 0", "validate": "validation_step"}.get(loop)
    for _, error in found:
        assert f"the first batch of {step or f'{loop}_step'} on" in error
        assert f"differs from the same step on one process: {said}" in error
        assert "LP801" in error


def test_what_a_warning_has_named_ends_no_run() -> None:
    found = run_ranks(_run, 2, "zero3", ["validate"], "unweighted", timeout=120)
    (said,) = found[0][0].values()
    assert "the metric 'mean' differs between replicas, as a warning says" in said
    assert [error for _, error in found] == ["", ""]


def test_random_numbers_are_not_proved() -> None:
    found = run_ranks(_run, 2, "tp2", ["validate"], "draws", timeout=120)
    outcome = "not proved: the step draws random numbers"
    assert found[0] == ({"first batch of validation_step": outcome}, "")


def test_nothing_is_proved_where_nobody_asks(tmp_path: Path) -> None:
    for found in run_ranks(_run, 2, "tp2", ["fit", "test"], "val", verify=False, timeout=120):
        assert found == ({}, "")
