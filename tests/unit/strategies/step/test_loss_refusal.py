"""What the refusal of a loss says first: the cure to which the code of the step points."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_par.engine.batch import BatchDims
from lightning_par.strategies.start.loss_refusal import refusal_of_loss
from lightning_par.strategies.step.batch_weights import MEAN_OVER_SAMPLES


class OneBatch(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Any:
        return batch["x"].square().mean().exp()


class Hardest(OneBatch):
    def loss(self, batch: Any) -> Any:
        return (lambda losses: losses.topk(2).values.mean())(batch["x"])


class Compared(OneBatch):
    def loss(self, batch: Any) -> Any:
        return (batch["x"] @ batch["x"].T).logsumexp(1).mean()


def drawn() -> OneBatch:
    generator = np.random.default_rng(1)

    def draw(size: int) -> torch.Tensor:
        return torch.from_numpy(generator.random(size))

    class Drawn(OneBatch):
        def loss(self, batch: Any) -> Any:
            return (batch["x"] * draw(len(batch["x"]))).mean()

    return Drawn()


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (OneBatch, "If the loss is a weighted mean"),
        (Hardest, "The step calls topk, which may need all samples of the batch. Use "),
        (Compared, "If samples are compared with each other"),
        (drawn, "If the step draws random numbers that choose which labels or samples"),
    ],
)
def test_cure_to_which_the_step_points_is_first(make: Callable[[], Any], first: str) -> None:
    dims = BatchDims(size=8, dims={"x": 0})
    text = refusal_of_loss(make(), MEAN_OVER_SAMPLES, dims, 4, 2)
    what, why, write, *cures, last = text.splitlines()
    assert ": the loss of a batch cannot be computed from the losses of its parts" in what
    assert f".training_step ({__file__}:" in what
    assert " on 4 micro-batches and 2 replicas: " in what
    assert why.startswith("Why: the loss of a batch was compared")
    assert "It is neither the mean over the samples, nor" in why
    assert write == "What to write:"
    assert cures[0].startswith(f"  - {first}")
    assert "num_microbatches=1 and data_parallel_size=1." in text
    assert last == "No weight was changed."
    assert "has no batch dim" not in text  # there is one entry, which has


def test_entries_are_named_where_one_may_have_no_batch_dim() -> None:
    dims = BatchDims(size=8, dims={"x": 0, "table": 0})
    text = refusal_of_loss(OneBatch(), MEAN_OVER_SAMPLES, dims, 1, 2)
    assert "If one of the entries 'x', 'table' has no batch dim, declare BatchLayout(whole=" in text
    assert text.endswith("Otherwise use data_parallel_size=1.\nNo weight was changed.")
