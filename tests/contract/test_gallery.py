"""The gallery of examples/: each trains on its mesh as it does on one device."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_par.observe.modes import DoublePrecision
from tests.support.cli_scripts import run_script
from tests.support.ranks.api import run_ranks

ROOT = Path(__file__).resolve().parents[2]
GALLERY = sorted((ROOT / "examples").glob("*.yaml"))
SHORT = [
    "--trainer.overfit_batches=2",  # in the order of the samples: Lightning shuffles for replicas
    "--trainer.max_epochs=1",
    "--trainer.max_steps=-1",
    "--trainer.log_every_n_steps=1",
    "--trainer.limit_val_batches=0",
    "--trainer.logger=CSVLogger",
    "--trainer.logger.save_dir=.",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.precision=64-true",
]

pytestmark = pytest.mark.contract


def run_in_float64(rank: int, world: int, *words: Any) -> str:
    torch.set_default_dtype(torch.float64)  # metrics, too
    with DoublePrecision():  # transformers computes losses in float32
        return run_script(rank, world, *words)


def losses(config: Path, devices: int, folder: Path, *words: str) -> list[float]:
    folder.mkdir()
    script = config.with_suffix(".py")
    run_ranks(
        run_in_float64,
        devices,
        script,
        folder,
        "fit",
        f"--config={config}",
        *SHORT,
        *words,
        timeout=150,
    )
    (file,) = folder.rglob("metrics.csv")
    with file.open() as rows:
        return [float(row["loss"]) for row in csv.DictReader(rows) if row["loss"]]


@pytest.mark.parametrize("config", GALLERY, ids=lambda path: path.stem)
def test_example_on_its_mesh_equals_one_device(config: Path, tmp_path: Path) -> None:
    """Two steps in float64, to 1e-10: sums in another order differ by about 1e-15."""
    script = config.with_suffix(".py")
    assert len(script.read_text().splitlines()) < 80
    said: dict[str, Any] = yaml.safe_load(config.read_text())
    devices, strategy = (said["trainer"][name] for name in ("devices", "strategy"))
    on_mesh = losses(config, devices, tmp_path / "mesh")
    # Weights that are made in configure_model are drawn by their names, not one after another.
    plain = "auto" if "configure_model" not in script.read_text() else "hybrid3d"
    one = ["--trainer.devices=1", f"--trainer.strategy={plain}"]
    if isinstance(strategy, dict):
        replicas = strategy["init_args"].get("data_parallel_size", 1)
        if replicas > 1:
            one.append(f"--data.batch_size={replicas * said['data']['batch_size']}")
    alone = losses(config, 1, tmp_path / "alone", *one)
    assert on_mesh == pytest.approx(alone, rel=1e-10)
    assert len(alone) == 2
    assert alone[0] != alone[1]
