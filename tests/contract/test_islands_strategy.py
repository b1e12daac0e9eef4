"""`Trainer(strategy="islands")`: every device of a script is an island, without anything else."""

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_par import IslandsStrategy
from lightning_par.callbacks import IslandMonitor
from lightning_par.errors import ConfigurationError
from tests.contract.test_launch import environment, free_port, marked, run

pytestmark = pytest.mark.contract
SCRIPT = Path(__file__).with_name("islands_script.py")
SEED, STEPS = 1, 16


class Regression(BoringModel):
    """A linear layer."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        torch.manual_seed(0)
        return DataLoader(RandomDataset(32, 64), batch_size=4)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def one_process() -> tuple[torch.Tensor, float]:
    """The weights and the validation loss after the same steps on one device."""
    torch.set_default_dtype(torch.float64)
    try:
        pl.seed_everything(SEED)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            limit_val_batches=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module := Regression())
        return module.layer.weight.detach(), float(trainer.callback_metrics["val_loss"])
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_script_trains_an_island_on_every_device(tmp_path: Path) -> None:
    """Three runs of one script: twice the same, and one in which an island is killed."""
    result = tmp_path / "result"
    ((status, said),) = run(tmp_path, [([str(SCRIPT), str(result)], {})])
    assert status == 0, said
    found = [json.loads(result.with_suffix(f".{i}").read_text()) for i in range(2)]
    weight, loss = one_process()
    assert found[0]["variables"] == []
    for island in found:
        for held in island["runs"][:2]:
            own = torch.tensor(held["weight"], dtype=torch.float64)
            torch.testing.assert_close(own, weight, rtol=0, atol=1e-12)
            assert held["val_loss"] == pytest.approx(loss, abs=1e-12)
            assert (held["steps"], held["world"]) == (STEPS, 1)
            assert (held["rounds"], held["contributing"]) == (STEPS, [[0, 1]] * STEPS)
            assert 0 < held["agreement"] < 1
    assert [len(island["runs"]) for island in found] == [3, 2]
    assert found[0]["runs"][2]["steps"] == 2 * STEPS  # of half of the samples each
    assert found[0]["runs"][2]["weight"] != found[0]["runs"][1]["weight"]
    alone = found[0]["runs"][2]["contributing"]
    assert alone[0] == [0, 1]
    assert alone[-1] == [0]
    picture = (tmp_path / "islands.svg").read_text()
    assert "island 0" in picture
    assert "island 1" in picture
    assert re.search(
        r"island 1 \(pid \d+\) has ended with status -9; the other islands continue", said
    )
    assert marked(tmp_path) == []


def test_under_a_launcher_a_server_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(Path(), RANK=0, LOCAL_RANK=0, WORLD_SIZE=2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", free_port())
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="islands", logger=False)
    with pytest.raises(ConfigurationError, match="lightning-par serve") as raised:
        trainer.fit(Regression())
    assert raised.value.code == "LP705"


@pytest.mark.parametrize("devices", [1, 2])
def test_one_of_several_islands_counts_its_devices(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_ISLAND", "2/4")
    strategy = pl.Trainer(accelerator="cpu", devices=devices, strategy="islands").strategy
    assert isinstance(strategy, IslandsStrategy)
    assert strategy.processes.island == 2 * devices
    assert strategy.processes.samplers == {"num_replicas": 4 * devices, "rank": 2 * devices}


def test_a_monitor_of_islands_needs_islands() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="hybrid3d", max_steps=1, callbacks=[IslandMonitor()]
    )
    with pytest.raises(ConfigurationError, match="needs a strategy with islands"):
        trainer.fit(Regression())


def test_sizes_are_those_of_one_device() -> None:
    with pytest.raises(Exception, match="tensor_parallel_size=2"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=IslandsStrategy(tensor_parallel_size=2))
