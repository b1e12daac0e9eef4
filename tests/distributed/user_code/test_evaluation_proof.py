"""Validation, test and prediction are proved: equal batches pass, others end the run."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_par import Hybrid3DStrategy
from lightning_par.errors import VerificationError
from lightning_par.strategies.proof import skeleton
from lightning_par.strategies.proof.by_blocks import GatheredWhenRead
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


def _run_large(*args: Any, **options: Any) -> tuple[dict[str, str], str, list[int]]:
    """Run what rank 0 has no room for; give the bytes that it had of parameters at once, too."""
    peaks, leave = list[int](), GatheredWhenRead.__exit__

    def note(mode: Any, *error: object) -> None:
        peaks.append(mode.peak)
        leave(mode, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton, "_COPIES", 2**60)
        patch.setattr(GatheredWhenRead, "__exit__", note)
        for name, value in options.pop("values", {}).items():
            patch.setattr(f"lightning_par.strategies.proof.{name}", value)
        return *_run(*args, **options), peaks


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


@pytest.mark.parametrize("run", [_run, _run_large])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "cp2"])
def test_loops_of_their_own_are_equal(layout: str, run: Any) -> None:
    loops = ["validate", "test", "predict"]
    found = run_ranks(run, world_of(layout), layout, loops, timeout=120)
    assert [error for _, error, *_ in found] == [""] * len(found)
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
    if run is _run_large:
        whole = sum(p.nbytes for p in ToyModule("sgd").double().parameters())
        peaks = [peak for *_, of_rank in found for peak in of_rank]
        assert len(peaks) == (2 if replicas else 3)  # on rank 0
        assert all(0 < peak < whole / 2 for peak in peaks)


@pytest.mark.parametrize(
    ("layout", "sanity", "run"),
    [
        *product(["tp2", "pp2", "zero3", "cp2"], [2, 0], [_run]),
        *product(["tp2", "zero3"], [2, 0], [_run_large]),
    ],
)
def test_validation_of_a_fit_is_equal_for_each_loader(layout: str, sanity: int, run: Any) -> None:
    options = {"num_sanity_val_steps": sanity, "val_check_interval": 1}
    found = run_ranks(run, world_of(layout), layout, ["fit"], timeout=120, **options)
    assert [error for _, error, *_ in found] == [""] * len(found)
    own = _OF_REPLICAS if layout == "zero3" else "equal"
    wanted = {
        "first batch of validation_step, loader 0": own,
        "first batch of validation_step, loader 1": own,
        "training step 0": "equal",
    }
    if run is _run_large:
        only = "in part: only loss and gradients of one batch were compared"
        assert found[0][0].pop("training step 0").startswith(only)
        del wanted["training step 0"]
    assert found[0][0] == wanted


@pytest.mark.parametrize("run", [_run, _run_large])
@pytest.mark.parametrize(
    ("loop", "fault", "layout", "said"),
    [
        ("validate", "val", "tp2", "the logged 'val_loss' is"),
        ("validate", "val", "zero3", "the logged 'val_loss' is"),
        ("fit", "val", "pp2", "the logged 'val_loss' is"),
        ("test", "test", "pp2", "the logged 'test_loss' is"),
        ("test", "test", "zero3", "the logged 'test_loss' is"),
        ("predict", "predict", "tp2", "what the step returns has the norm"),
    ],
)
def test_a_difference_ends_the_run_on_every_rank(
    loop: str, fault: str, layout: str, said: str, run: Any
) -> None:
    found = run_ranks(run, world_of(layout), layout, [loop], fault, timeout=120)
    step = {"fit": "validation_step, loader 0", "validate": "validation_step"}.get(loop)
    for _, error, *_ in found:
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


def test_a_large_batch_that_takes_one_process_too_long_is_not_proved() -> None:
    values = {"evaluation_proof.LONGEST": 0.0}
    found = run_ranks(_run_large, 2, "tp2", ["validate"], timeout=120, values=values)
    outcome = "not proved: one process needs more than 0 minutes for its batch"
    assert found[0][:2] == ({"first batch of validation_step": outcome}, "")
    assert found[1][1] == ""
