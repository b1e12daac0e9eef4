"""Rows of packed documents on every layout: the losses and weights of documents trained alone."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.nn import functional as F

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule, MixtralModule, TextDataModule, write_token_file
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (1, {**ONE, "tensor_parallel_size": 2}),
    "pp2": (1, {**ONE, "pipeline_parallel_size": 2, "num_microbatches": 8}),
    "cp2": (1, {**ONE, "context_parallel_size": 2}),
    "zero3": (2, {**ONE, "zero_stage": 3}),
    "tp2pp2": (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
SIZES = {"num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 50}
BATCH, LENGTH = 8, 32


class Alone(GPTModule):
    """Computes each document by itself, as if no other were in its row."""

    def _loss(self, batch: Any) -> Tensor:
        losses = list[Tensor]()
        for row, bounds in zip(batch["input_ids"], batch["cu_seqlens"].tolist(), strict=True):
            parts = [self.model(row[None, a:b]) for a, b in pairwise(bounds) if a < b]
            losses.append(torch.cat(parts, 1)[0])
        labels = batch["labels"]
        return F.cross_entropy(torch.cat(losses), labels.flatten(), ignore_index=-100)


class Losses(Callback):
    def __init__(self) -> None:
        self.found = list[float]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def write(folder: Path) -> str:
    """Write documents of 1 to 60 tokens, some longer than a row."""
    draws = np.random.default_rng(3)
    parts = [draws.integers(0, 50, size) for size in draws.integers(1, 60, 80)]
    write_token_file(folder / "corpus.bin", parts, vocab_size=50, documents=True)
    return str(folder / "corpus.bin")


def train(kind: type[Any], layout: str | None, path: str, positions: str) -> Any:
    torch.set_default_dtype(torch.float64)
    seed_everything(2, verbose=False)
    replicas, options = (1, ONE) if layout is None else LAYOUTS[layout]
    sizes: dict[str, Any] = dict(SIZES)
    if kind is MixtralModule:
        sizes |= {"num_experts": 4, "experts_per_token": 2, "ff_dim": 32}
    else:
        sizes |= {"positions": positions, "max_length": LENGTH}
    module = kind(preset="tiny", overrides=sizes, lr=1e-2)
    data = TextDataModule(
        [path],
        length=LENGTH,
        batch_size=BATCH // replicas,
        validation_fraction=0.2,
        test_fraction=0,
        documents=True,
    )
    losses = Losses()
    trainer = quiet_trainer(
        strategy=Hybrid3DStrategy(**options),
        devices=1 if layout is None else len_of(layout),
        precision="64-true",
        callbacks=[losses],
        max_steps=3,
        val_check_interval=3,
    )
    trainer.fit(module, data)
    logged = float(trainer.callback_metrics["val_loss"])
    return losses.found, [p.detach().clone() for p in module.parameters()], logged


def len_of(layout: str) -> int:
    return 4 if layout == "tp2pp2" else 2


def _on_rank(rank: int, world: int, *args: Any) -> Any:
    return train(*args)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packed_documents_equal_documents_alone(positions: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    check(run_ranks(_on_rank, 1, Alone, None, path, positions), GPTModule, None, path, positions)


# The balance of experts is a property of the micro-batch, and of the replica.
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((GPTModule, name) for name in LAYOUTS), (MixtralModule, "tp2"), (MixtralModule, "cp2")],
)
def test_a_layout_equals_one_process(kind: type[Any], layout: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    check(run_ranks(_on_rank, 1, kind, None, path, "rotary"), kind, layout, path, "rotary")


def check(wanted: Sequence[Any], kind: type[Any], layout: str | None, *args: str) -> None:
    world = 1 if layout is None else len_of(layout)
    ((losses, weights, logged),) = wanted
    for found, held, said in run_ranks(_on_rank, world, kind, layout, *args, timeout=180):
        if layout != "zero3":  # else that of this replica
            torch.testing.assert_close(found, losses, rtol=0, atol=1e-6)  # of logs in float32
        torch.testing.assert_close(held, weights, rtol=0, atol=1e-9)
        torch.testing.assert_close(said, logged, rtol=0, atol=1e-6)
