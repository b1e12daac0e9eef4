"""Numbers that `setup` computes from the number of processes, for schedules and optimizers."""

import math
import os
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_par.errors import ConfigurationError
from tests.support.cures import Cures
from tests.support.models.plain_language_model import AttendingNet, PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of

CURES = Cures(__name__)
CASES = CURES.cases
_TOLD = r"setup computes \S+\.\w+ from the number of processes \(.*estimated_stepping_batches"
_SAMPLES, _BATCH = 32, 8


class Planned(PlainModule):
    """Has a schedule of each step."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = self._make(made, self)
        return [made], [{"scheduler": schedule, "interval": "step"}]


def cosine(made: Any, module: Any) -> Any:
    return CosineAnnealingLR(made, module.total)


@CURES.add("LP416", _TOLD, "tp2")
def the_length_of_a_cosine(cured: bool) -> Any:
    class Module(Planned):
        def setup(self, stage: str) -> None:
            steps = self.trainer.estimated_stepping_batches
            self.total = steps if cured else _SAMPLES // (_BATCH * self.trainer.num_devices) * 2

    return Module(cosine)


@CURES.add("LP416", _TOLD, "pp2")
def the_length_of_one_cycle(cured: bool) -> Any:
    class Module(Planned):
        def setup(self, stage: str) -> None:
            self.world = int(os.environ.get("WORLD_SIZE", "1"))

        def steps(self) -> int:
            found = math.ceil(4 * _SAMPLES / (_BATCH * self.world))
            return int(self.trainer.estimated_stepping_batches) if cured else found

    return Module(lambda made, module: OneCycleLR(made, 0.5, total_steps=module.steps()))


@CURES.add("LP416", _TOLD, "cp2")
def the_length_in_a_function_of_steps(cured: bool) -> Any:
    class Module(Planned):
        def setup(self, stage: str) -> None:
            self._plan(1 if cured else self.trainer.world_size)

        def _plan(self, processes: int) -> None:
            steps = int(self.trainer.estimated_stepping_batches)
            self.lengths = {"total": int(steps / processes)}

        def factor(self, step: int) -> float:
            return float(1 - step / (2 * self.lengths["total"]))

    made = Module(lambda made, module: LambdaLR(made, lambda step: module.factor(step)))
    made.net = AttendingNet()
    return made


@CURES.add(
    "LP416", r"setup computes Module.rate .*\(lr=0\.4\).*hyperparameter of the module", "zero1"
)
def a_learning_rate_of_setup(cured: bool) -> Any:
    class Module(PlainModule):
        def setup(self, stage: str) -> None:
            self.rate = 0.4 if cured else 0.2 * self.trainer.world_size

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.rate)

    return Module()


@CASES.add(equal="zero1")
def a_length_that_counts_replicas() -> Any:
    class Module(Planned):
        def setup(self, stage: str) -> None:
            # Each replica has a part of the batch.
            world = self.trainer.world_size
            self.total = _SAMPLES // (_BATCH // world * world) * 2

    return Module(cosine), token_pairs()


@CASES.add(equal="tp2 pp2")
def numbers_that_no_schedule_reads() -> Any:
    class Module(Planned):
        def setup(self, stage: str) -> None:
            world = self.trainer.world_size
            self.shard = list(range(_SAMPLES))[self.trainer.global_rank :: world]
            self.per_process, self.processes = len(self.shard), world
            self.print(f"{world} processes")
            self.total = int(self.trainer.estimated_stepping_batches)
            self.steps = [2, 16 // 5]

    made = Module(lambda made, module: MultiStepLR(made, [module.total // 2, *module.steps]))
    return made, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)


class Data(pl.LightningDataModule):
    """Computes the length of the schedule, as the module cannot before the data is there."""

    def __init__(self, *, of_callback: bool) -> None:
        super().__init__()
        self.of_callback, self.total = of_callback, 8

    def setup(self, stage: str) -> None:
        self.samples = token_pairs()
        if not self.of_callback:
            trainer: Any = self.trainer
            self.total = len(self.samples) // (_BATCH * trainer.num_devices)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, _BATCH)


class Planning(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.datamodule.hparams.total = 8 // trainer.num_devices


def _refused(rank: int, world: int, layout: str, of_callback: bool) -> str:
    seed_everything(0, verbose=False)

    def total(module: Any) -> int:
        data = module.trainer.datamodule
        return int(data.hparams.total if of_callback else data.total)

    module = Planned(lambda made, it: LambdaLR(made, lambda step: 1 / (1 + step / total(it))))
    callbacks: list[Any] = [Planning()] if of_callback else []
    trainer = quiet_trainer(
        devices=world, strategy=strategy_of(layout), max_steps=2, callbacks=callbacks
    )
    with pytest.raises(ConfigurationError, match="LP416") as caught:
        trainer.fit(module, datamodule=Data(of_callback=of_callback))
    assert "setup" not in vars(module)
    return str(caught.value)


@pytest.mark.parametrize("of_callback", [False, True])
def test_a_length_of_the_data_module_or_a_callback_is_refused(of_callback: bool) -> None:
    for text in run_ranks(_refused, 2, "tp2", of_callback, timeout=180):
        assert re.search(r"setup computes \w+\.total from .*trainer\.num_devices in line", text)
