"""Optimizers whose numbers come from the number of processes are refused, also in schedules."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.setup.world_reads import check_world_reads


class Module(pl.LightningModule):
    """Makes an optimizer, and a schedule, from the number of processes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.weight = nn.Parameter(torch.ones(2))
        self.made: Any = None

    def configure_optimizers(self) -> Any:
        self.calls += 1
        world, lr = int(os.environ["WORLD_SIZE"]), 0.1
        steps = 100 // world
        made = torch.optim.SGD([self.weight], lr=torch.tensor(lr * world))
        if self.kind != "tensor":
            made = torch.optim.SGD([self.weight], lr=lr)
        self.made = made
        if self.kind == "one cycle":
            return [made], [OneCycleLR(made, 0.1, total_steps=steps)]
        if self.kind == "lambda":
            made_later: float

            def factor(step: int) -> float:
                return step / (steps if step < steps else made_later)

            rates = [made], [LambdaLR(made, factor)]
            if self.calls < 0:
                made_later = 1.0
            return rates
        if self.kind == "sequence":
            parts = [LinearLR(made, total_iters=steps), LinearLR(made, total_iters=3)]
            return [made], [SequentialLR(made, parts, milestones=[5])]
        return made


def made_for(kind: str) -> tuple[Module, Any]:
    module = Module(kind)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return module, trainer


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tensor", r"computes lr=0\.2\d* from .*on one process it is 0\.1"),
        (
            "one cycle",
            r"computes total_steps=50 of a learning-rate .*it is 100.*estimated_stepping_batches",
        ),
        (
            "lambda",
            r"computes steps=50 of a learning-rate .*it is 100.*estimated_stepping_batches",
        ),
        (
            "sequence",
            r"computes total_iters=50 of a learning-rate .*it is 100.*estimated_stepping_batches",
        ),
    ],
)
def test_a_number_by_the_number_of_processes_is_refused(kind: str, told: str) -> None:
    _, trainer = made_for(kind)
    with pytest.raises(ConfigurationError, match=told):
        check_world_reads(trainer.strategy.setup_optimizers, trainer)


def test_the_optimizers_of_the_first_call_stay() -> None:
    module, trainer = made_for("number that nothing comes from")
    check_world_reads(trainer.strategy.setup_optimizers, trainer)
    assert module.calls == 1
    assert trainer.optimizers == [module.made]
    assert module.made.param_groups[0]["lr"] == 0.1
