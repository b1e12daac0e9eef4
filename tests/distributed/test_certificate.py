"""The certificate that a run leaves: the same weights have the same hash on every mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_par import Hybrid3DStrategy
from lightning_par.observe.certificate import (
    CERTIFICATE,
    Certificate,
    read_certificate,
)
from lightning_par.observe.weights_hash import WeightsHash
from lightning_par.strategies.start import start
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS, world_of


class Nowhere(Logger):
    """Keeps no files."""

    name, version = "nowhere", 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


class Still(ToyModule):
    """Its steps leave the weights as they are, so that they are the same on all meshes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(
    rank: int, world: int, folder: str, layout: str, verify: Any = "auto", **options: Any
) -> None:
    module = Still()  # draws with seed 5
    chosen: dict[str, Any] = {"logger": CSVLogger(folder, version=0), "max_epochs": 2, **options}
    trainer = quiet_trainer(
        devices=world,
        strategy=Hybrid3DStrategy(**LAYOUTS[layout], verify=verify),
        default_root_dir=folder,
        proves=True,
        **chosen,
    )
    trainer.fit(module, loader(ToyData(8), 2))


def _read(folder: Path) -> Certificate:
    return read_certificate(folder / "lightning_logs" / "version_0")


def _expected() -> dict[str, Any]:
    found = WeightsHash()
    for name, parameter in sorted(Still().named_parameters()):
        found.add(name, parameter)
    return found.result()


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "pp2_interleaved", "zero3", "cp2"])
def test_the_hash_is_that_of_the_whole_model(layout: str, tmp_path: Path) -> None:
    run_ranks(_fit, world_of(layout), str(tmp_path), layout, timeout=120)
    found = _read(tmp_path)
    assert found.weights == _expected()
    replicas = 2 if layout == "zero3" else 1
    assert (found.seed, found.steps, found.precision) == (5, 8 // replicas, "32-true")
    assert found.data == {"epoch": 1, "batch": 4 // replicas}
    assert found.options["zero_stage"] == LAYOUTS[layout].get("zero_stage", 1)
    assert max(found.layout.values()) == world_of(layout)
    if layout == "one":
        assert found.proofs == {}
    else:
        outcome = "in part: the update is not compared, since every learning rate is 0"
        assert found.proofs == {"training step 0": outcome}
    if layout in ("zero3", "pp2"):
        assert "loss" in {made["name"] for made in found.decisions}


def test_what_is_not_proved_is_said(tmp_path: Path) -> None:
    run_ranks(_fit, 2, str(tmp_path), "tp2", "every 4", max_steps=5)
    outcomes = _read(tmp_path).proofs
    assert list(outcomes) == ["training step 0", "training step 4"]
    assert outcomes["training step 4"] == "equal"


def _fit_large(rank: int, world: int, folder: str) -> None:
    kept, start.LARGEST = start.LARGEST, 1000
    try:
        _fit(rank, world, folder, "tp2", False)
    finally:
        start.LARGEST = kept


def test_a_large_model_has_no_hash(tmp_path: Path) -> None:
    run_ranks(_fit_large, 2, str(tmp_path))
    assert _read(tmp_path).weights["note"].startswith("no hash: the model has")


@pytest.mark.parametrize(
    ("options", "is_written"),
    [
        ({"logger": False}, False),
        ({"logger": False, "enable_checkpointing": True}, True),
        ({"fast_dev_run": True}, False),
        ({"logger": Nowhere()}, False),
    ],
)
def test_a_run_that_leaves_no_file_leaves_no_certificate(
    options: dict[str, Any], is_written: bool, tmp_path: Path
) -> None:
    run_ranks(_fit, 2, str(tmp_path), "tp2", False, **options)
    found = list(tmp_path.rglob(CERTIFICATE))
    assert len(found) == is_written
    for path in found:
        assert path.parent == tmp_path / "checkpoints"
        assert json.loads(path.read_text())["proofs"] == {}
