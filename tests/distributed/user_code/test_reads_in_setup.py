"""`setup` that reads the number of processes, which is not that of replicas, is told."""

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Computing(PlainModule):
    """Computes the length of its schedule in `setup`, as code for DDP does."""

    def setup(self, stage: str) -> None:
        self.length = 16 // self.trainer.num_devices

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Advised(Computing):
    """As the warning advises."""

    def setup(self, stage: str) -> None:
        pass

    def configure_optimizers(self) -> Any:
        self.length = int(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


class Failing(Computing):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        raise KeyError("no such entry")


def _told(rank: int, world: int, kind: type[PlainModule], layout: str) -> Any:
    seed_everything(0, verbose=False)
    sizes = pl.Trainer.world_size
    strategy = "auto" if world == 1 else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=4)
    module = kind().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(token_pairs(), 8))
        except KeyError as error:
            assert "no such entry" in str(error)  # noqa: PT017 - of `setup`
    assert pl.Trainer.world_size is sizes
    told = [str(each.message) for each in caught if "setup reads" in str(each.message)]
    return told, trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_length_from_the_number_of_processes_is_told_with_its_line(layout: str) -> None:
    (told, _), (others, _) = run_ranks(_told, 2, Computing, layout, timeout=180)
    assert len(told) == 1
    line = Computing.setup.__code__.co_firstlineno + 1
    assert re.search(rf"trainer\.num_devices in line {line} of .*test_reads_in_setup\.py", told[0])
    assert "2 processes train 1 replica" in told[0]
    assert others == []


def test_the_advice_gives_the_schedule_of_one_process() -> None:
    ((_, alone),) = run_ranks(_told, 1, Advised, "", timeout=180)
    for told, rate in run_ranks(_told, 2, Advised, "tp2", timeout=180):
        assert (told, rate) == ([], alone)


def test_replicas_are_not_told() -> None:
    assert run_ranks(_told, 2, Computing, "zero1", timeout=180)[0][0] == []


def test_a_setup_that_fails_leaves_nothing_behind() -> None:
    assert [told for told, _ in run_ranks(_told, 2, Failing, "tp2", timeout=180)] == [[], []]
