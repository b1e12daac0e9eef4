"""A save takes no more host memory than a rank's own part, and little besides."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor

import lightning_par
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

MIB = 1 << 20
FORMS = ("file", "folder")
WIDTH = 4096
WHOLE = 3 * 4 * WIDTH * WIDTH
"""Bytes of the weight and of Adam's two states of it."""


class Wide(pl.LightningModule):
    """One weight, far larger than what a step needs besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def resident(field: str) -> int:
    """Bytes of memory of this process, see proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


class Growth(pl.Callback):
    """Saves at the end, and notes by how much the memory grows at most."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
        trainer.save_checkpoint(self.path)
        trainer.strategy.finish_saving()
        self.bytes = resident("VmHWM") - before


def growth(rank: int, world: int, path: Path, options: dict[str, Any]) -> int:
    """Bytes by which a save lets the memory of this rank grow."""
    watch = Growth(path)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}
    more = {"verify": False, "gather_after_run": False, **options}
    strategy = lightning_par.Hybrid3DStrategy(data_parallel_size=world, **sizes, **more)
    data = torch.utils.data.DataLoader(torch.ones(world, WIDTH), batch_size=1)
    trainer = quiet_trainer(strategy=strategy, devices=world, callbacks=[watch], max_steps=1)
    trainer.fit(Wide(), data)
    return watch.bytes


@pytest.mark.parametrize(
    ("form", "background"),
    [("file", False), *(pytest.param(f, True, marks=pytest.mark.exhaustive) for f in FORMS)],
)
def test_save_takes_a_shard_and_64_mib_at_most(form: str, background: bool, tmp_path: Path) -> None:
    options = {"checkpoint_format": form, "async_save": background}
    shard = WHOLE // 2
    assert shard + 64 * MIB <= WHOLE - 32 * MIB  # so that it would not pass if one gathered it
    for found in run_ranks(growth, 2, tmp_path / "a.ckpt", options, fresh=True, timeout=120):
        assert found <= shard + 64 * MIB
    path = tmp_path / "a.ckpt"
    assert path.is_file() == (form == "file")
    found = lightning_par.load_from_checkpoint(Wide, path).layer.weight
    assert found.shape == (WIDTH, WIDTH)
