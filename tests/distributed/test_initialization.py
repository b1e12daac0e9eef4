"""The same seed gives the same weights on any mesh, and no rank builds the whole model."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from tests.support.ranks.api import run_ranks
from tests.support.samples import byte_loader

SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
    "pp2": (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    "dp2": (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}),
    "tp2pp2": (4, {}),
}


def initial_weights(rank: int, world: int, options: dict[str, Any]) -> Any:
    pl.seed_everything(11, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(**options, gather_after_run=False),
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GPTModule(overrides={"num_layers": 3})
    torch.randn(rank)  # ranks whose random states differ still agree
    trainer.fit(module, byte_loader())
    whole = sum(p.numel() for p in module.parameters())
    return trainer.strategy.gather_state_dict(), whole


@pytest.fixture(scope="module")
def reference() -> Any:
    return run_ranks(initial_weights, 1, {})[0][0]


@pytest.mark.parametrize("layout", [name for name in SIZES if name != "one"])
def test_weights_do_not_depend_on_the_layout(layout: str, reference: Any) -> None:
    world, options = SIZES[layout]
    weights = run_ranks(initial_weights, world, options, timeout=120)[0][0]
    assert list(weights) == list(reference)
    for name, weight in weights.items():
        assert torch.equal(weight, reference[name]), name
    assert len({float(w.std()) for w in weights.values() if w.ndim == 2}) > 1
