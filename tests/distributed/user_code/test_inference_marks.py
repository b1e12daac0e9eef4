"""A step is traced to infer a plan, and the run is as if it had not been."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_par import Hybrid3DStrategy
from tests.support.models import structures
from tests.support.models.plain_language_model import token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Counts:
    """What a step keeps of the batches that it has seen."""

    def __init__(self) -> None:
        self.tokens, self.firsts = 0, [[0]]


class Counting(structures.Planless):
    """Counts in an object, a nested list, a tensor and a metric, and draws from generators."""

    def __init__(self, draws: bool) -> None:
        super().__init__(structures.LanguageModel())
        self.counts = Counts()
        self.total = torch.zeros(())
        self.mean = MeanMetric()
        self.dice, self.noise, self.draws = random.Random(3), np.random.default_rng(3), draws

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["tokens"]
        self.counts.tokens += tokens.numel()
        self.counts.firsts[0][0] += int(tokens[0, 0])
        self.total += tokens.numel()
        self.mean.update(float(tokens[0, 0]))
        loss = F.cross_entropy(self.net(tokens).flatten(0, 1), batch["labels"].flatten())
        if self.draws:
            loss = loss * (1 + self.dice.random() + self.noise.random())
        self.log("loss", loss, sync_dist=True)
        return loss


class Files(pl.LightningDataModule):
    """A loader for the next file, each time that one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.read = 0, list[int]()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        tokens, labels = batch["pair"]
        return {"tokens": tokens, "labels": labels}

    def train_dataloader(self) -> DataLoader[Any]:
        self.next += 1
        rows = token_pairs()[8 * (self.next - 1) : 8 * self.next]
        self.read.append(self.next)
        return DataLoader([{"pair": row} for row in rows], 4)  # type: ignore[arg-type]


def run(rank: int, world: int, layout: str | None, draws: bool) -> dict[str, Any]:
    """Train for two epochs, a file each."""
    seed_everything(0, verbose=False)
    module, data = Counting(draws), Files()
    options = {} if layout is None else {**LAYOUTS[layout], "verify": False}
    trainer = quiet_trainer(
        devices=world,
        strategy="auto" if layout is None else Hybrid3DStrategy(**options),
        num_sanity_val_steps=0,
        precision="64-true",
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module, data)
    return {
        "kept": (module.counts.tokens, module.counts.firsts, float(module.total)),
        "mean": float(module.mean.weight),
        "read": data.read,
        "weights": {n: p.detach().clone() for n, p in module.named_parameters()},
    }


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp2", ("kept", "mean", "read")),
        # What its step keeps is told by micro-batches.
        pytest.param("pp2", ("read",), marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_of_the_trace_is_left(layout: str, names: tuple[str, ...]) -> None:
    """Objects, nests, tensors, metrics and loaders are those of a plain run."""
    draws = layout != "pp2"  # micro-batches draw for themselves
    wanted = run(0, 1, None, draws)
    for found in run_ranks(run, 2, layout, draws, timeout=180):
        for name in names:
            assert found[name] == wanted[name], name
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-10)
