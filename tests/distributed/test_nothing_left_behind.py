"""A run, ended well or badly, leaves the process as it was."""

import os
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import DoublePrecision
from torch.utils.data import DataLoader

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

NAMES = ["tensor_parallel", "pipeline_1f1b", "sequence_ring", "zero_offload", "hybrid3d", "islands"]
OF_LIGHTNING = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"}
"""Variables that Lightning's environment sets for DDP, too, and leaves."""


class AdamModule(PlainModule):
    """Trains with an optimizer that can be offloaded; may fail."""

    fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 1:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def look(plugin: Any) -> dict[str, Any]:
    """Describe what a run may change in its process."""
    return {
        **{f"${k}": v for k, v in os.environ.items() if k not in OF_LIGHTNING},
        "threads": sorted(t.name for t in threading.enumerate()),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "filters": list(warnings.filters),
        "precision plugin": (type(plugin), dict(vars(plugin))),
        "functions": [torch.optim.Optimizer.__init__, torch.nn.Module.__call__],
    }


def train(strategy: str, world: int, fails: bool, plugin: Any) -> float:
    """Train for an epoch, and return the next random number."""
    seed_everything(0, verbose=False)
    module = AdamModule()
    module.fails = fails
    trainer = quiet_trainer(devices=world, strategy=strategy, max_epochs=1, plugins=[plugin])
    try:
        trainer.fit(module, DataLoader(token_pairs(16), 8))  # type: ignore[arg-type]
    except ZeroDivisionError:
        assert fails
    return float(torch.rand(()))


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "fails"])
def test_one_device_leaves_nothing(strategy: str, fails: bool) -> None:
    run_ranks(_check, 1, strategy, fails, timeout=120)


@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline_1f1b", "zero_offload"])
def test_two_ranks_leave_nothing(strategy: str) -> None:
    run_ranks(_check, 2, strategy, False, timeout=120)


def _check(rank: int, world: int, strategy: str, fails: bool) -> None:
    import lightning_par  # noqa: F401 - registers the strategies

    seed_everything(0, verbose=False)
    plugin = DoublePrecision()
    before = look(plugin)
    drawn = train(strategy, world, fails, plugin)
    after = look(plugin)
    names = before | after
    assert {k: after.get(k) for k in names if before.get(k) != after.get(k)} == {}
    if world == 1:  # the generators are where a plain Trainer leaves them
        assert drawn == train("auto", world, fails, DoublePrecision())
