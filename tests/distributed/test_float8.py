"""Products in 8 bits: linear maps are converted and sharded, and results are as close as rounding.

The proof of the first step allows for it. On the CPU numbers are rounded to 8 bits and multiplied
in more (``emulate``).
"""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from lightning_par.strategies.setup.precision import Float8, Float8Precision, MasterWeightPrecision
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer, Recorder
from tests.support.ranks.api import run_ranks

pytest.importorskip("torchao")
ONE: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
CLOSE = {
    "tensorwise": {"rtol": 0, "atol": 2e-2},  # a rank has the scales of its own part
    "rowwise": {"rtol": 0, "atol": 2e-2},
    "mxfp8": {"rtol": 0, "atol": 2e-3},  # blocks of 32 numbers are not divided; bfloat16 sums are
}


class Tokens(GPTModule):
    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(2))
        return loader([{"input_ids": row[:-1], "labels": row[1:]} for row in rows], 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def blocks(module: Any) -> list[str]:
    return [f"model.blocks.{index}" for index in range(2)]


def train(recipe: str, options: dict[str, Any], devices: int) -> tuple[list[float], list[str]]:
    float8 = Float8(
        recipe=recipe, blocks=blocks, tensor=options["tensor_parallel_size"], emulate=True
    )
    plugin = MasterWeightPrecision(float8) if recipe == "mxfp8" else Float8Precision("cpu", float8)
    recorder = Recorder()
    module = Tokens(overrides={"vocab_size": 64, "model_dim": 128, "num_layers": 2, "ff_dim": 192})
    torch.manual_seed(3)
    trainer = quiet_trainer(
        proves=True,
        devices=devices,
        strategy=Hybrid3DStrategy(**options),
        plugins=[plugin],
        callbacks=[recorder],
        max_epochs=1,
        limit_val_batches=0,
    )
    trainer.fit(module)
    kinds = [type(part).__name__ for part in module.modules()]
    return recorder.losses, kinds


def train_rank(rank: int, world: int, recipe: str, options: dict[str, Any]) -> Any:
    return train(recipe, options, world)


@pytest.mark.parametrize("recipe", CLOSE)
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_products_in_8_bits_are_as_close_to_one_process_as_their_rounding(
    axis: str, recipe: str
) -> None:
    wanted, kinds = train(recipe, ONE, 1)
    converted = "MXFP8Linear" if recipe == "mxfp8" else "Float8Linear"
    assert kinds.count(converted) == 2 * 7
    options = {**ONE, f"{axis}_parallel_size": 2}
    for losses, _ in run_ranks(train_rank, 2, recipe, options, timeout=120):
        torch.testing.assert_close(losses, wanted, **CLOSE[recipe])
