"""The same seed gives the same weights on any mesh, and no rank builds the whole model."""

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
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


class Made(PlainModule):
    """Makes its network where it is told to."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.made = self.net if early else None
        self.net = self.made

    def configure_model(self) -> None:
        if self.net is None:
            self.net = PlainModule().net


def first_weights(rank: int, world: int, early: bool) -> Any:
    pl.seed_everything(3, verbose=False)
    module = Made(early=early)
    ones = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    strategy = Hybrid3DStrategy(**ones) if world > 1 else "auto"
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=0)
    with mock.patch("lightning_par.strategies.setup.parallelize.rank_zero_info") as said:
        trainer.fit(module, DataLoader(token_pairs(), 4))
    return module.state_dict(), [call.args[0] for call in said.mock_calls]


def test_other_first_weights_than_a_plain_trainer_has_are_said_with_what_gives_the_same() -> None:
    wanted = run_ranks(first_weights, 1, True)[0][0]
    cured, told = run_ranks(first_weights, 2, True)[0]
    assert told == []
    torch.testing.assert_close(cured, wanted, rtol=0, atol=0)
    _, told = run_ranks(first_weights, 2, False)[0]
    assert ["configure_model creates weights" in text for text in told] == [True]
    assert "create the model in __init__" in told[0]
