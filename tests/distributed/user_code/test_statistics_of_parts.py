"""Steps whose statistics are those of parts of a batch are proved part by part."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.errors import VerificationError
from lightning_par.models import MixtralModule
from tests.support.models.plain_language_model import NormalizedNet, PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of


class Normalized(PlainModule):
    """Each part of a batch is normalized by itself."""

    batch = replace(PlainModule.batch, local_statistics=True)

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(NormalizedNet())
        self.share = share

    def parallel_plan(self) -> Any:
        return replace(super().parallel_plan(), first=("net.statistics",))

    def loss(self, batch: Any) -> Tensor:
        """On the mesh a share of it, which is a fault if it is not 1."""
        return super().loss(batch) * (self.share if dist.is_initialized() else 1)


def _mixture() -> Any:
    sizes = {"vocab_size": 64, "num_layers": 2, "model_dim": 32, "num_heads": 4, "ff_dim": 64}
    return MixtralModule(overrides={**sizes, "num_kv_heads": 2, "num_experts": 4})


def _train(rank: int, world: int, layout: str, kind: str, accumulate: int) -> tuple[str, Any]:
    torch.manual_seed(0)
    pairs: Any = token_pairs()
    if kind == "mixture":
        pairs = [{"input_ids": x, "labels": y} for x, y in pairs]
    module = _mixture() if kind == "mixture" else Normalized(0.9 if kind == "faulty" else 1.0)
    strategy: Any = strategy_of(layout, verify="every 2")
    options = {"max_steps": 3, "accumulate_grad_batches": accumulate}
    trainer = quiet_trainer(devices=world, strategy=strategy, **options)
    try:
        trainer.fit(module, DataLoader(pairs, 4))
    except VerificationError as error:
        return str(error), {}
    return "", strategy.start.proof.outcomes


@pytest.mark.parametrize(
    ("kind", "layout", "accumulate"),
    [
        ("normalized", "zero1", 1),
        ("normalized", "pp2", 2),
        ("mixture", "zero1ep2", 1),
        ("mixture", "pp2", 1),
        ("mixture", "tp2", 1),
    ],
)
def test_parts_add_up_to_the_step(kind: str, layout: str, accumulate: int) -> None:
    (error, outcomes), *_ = run_ranks(_train, 2, layout, kind, accumulate, timeout=180)
    assert (error, outcomes) == ("", {"training step 0": "equal", "training step 2": "equal"})


@pytest.mark.parametrize("layout", ["zero1", "pp2"])
def test_another_loss_is_caught(layout: str) -> None:
    for error, _ in run_ranks(_train, 2, layout, "faulty", 1, timeout=180):
        assert "the loss of the global batch is" in error
