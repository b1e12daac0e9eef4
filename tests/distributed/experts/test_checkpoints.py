"""Experts that were divided go on where they were not, and the other way round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_par
from tests.support.models.mixture import layout, make
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

BIAS = {"balance": "bias", "num_shared_experts": 1}
STRATEGY = {"ep2": layout(dp=2, ep=2), "ep2 dp2": layout(dp=4, ep=2, zero=3)}


def train(
    rank: int, world: int, options: dict[str, Any] | None, source: Path | None, target: Path
) -> Any:
    """Train an epoch of three steps, or a second one from a checkpoint; save at the end."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    module, samples = make(**BIAS)
    strategy = "auto" if options is None else lightning_par.Hybrid3DStrategy(**options)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_epochs=1 if source is None else 2,
        precision="64-true",
        limit_val_batches=0,
    )
    training = DataLoader(samples, batch_size=4 // world)
    trainer.fit(module, training, DataLoader(samples), ckpt_path=source)
    trainer.save_checkpoint(target)
    if options is None:
        return {k: v.clone() for k, v in module.state_dict().items()}
    return trainer.strategy.gather_state_dict()


def one_process(source: Path | None, target: Path) -> Any:
    try:
        return train(0, 1, None, source, target)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [pytest.param("ep2", marks=pytest.mark.exhaustive), "ep2 dp2"])
def test_training_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    options = STRATEGY[name]
    world = options["data_parallel_size"]
    first, second, back = (tmp_path / f"{n}.ckpt" for n in ("first", "second", "back"))
    middle = one_process(None, first)
    wanted = one_process(first, second)
    close = {"rtol": 0, "atol": 1e-10}
    divided = run_ranks(train, world, options, first, tmp_path / "on.ckpt", timeout=120)[0]
    torch.testing.assert_close(divided, wanted, **close)
    halfway = run_ranks(train, world, options, None, back, timeout=120)[0]
    torch.testing.assert_close(halfway, middle, **close)
    again = run_ranks(train, world, options, back, tmp_path / "end.ckpt", timeout=120)[0]
    torch.testing.assert_close(again, wanted, **close)
