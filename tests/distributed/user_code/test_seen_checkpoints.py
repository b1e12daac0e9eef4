"""`on_save_checkpoint` sees the checkpoint of one process, in a run and after it; what it writes
there is saved.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par.upstream.pytree import tree_flatten
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of, world_of


def sums(states: Any) -> dict[Any, float]:
    return {number: float(state["exp_avg"].abs().sum()) for number, state in states.items()}


class Seeing(PlainModule):
    """Reads weights and states from its checkpoints, and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        weights, (optimizer,) = checkpoint["state_dict"], checkpoint["optimizer_states"]
        self.found.append({name: float(value.norm()) for name, value in weights.items()})
        self.found.append(sums(optimizer["state"]))
        self.found.append([group["params"] for group in optimizer["param_groups"]])
        last = list(weights)[-1]
        weights[last] = weights[last] * 2
        optimizer["state"].pop(1)
        optimizer["param_groups"][0]["lr"] = 0.5
        checkpoint["of_mine"] = weights[last] + 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.save_checkpoint("in_a_hook.ckpt")


def fit(layout: str | None, rank: int, world: int) -> Any:
    seed_everything(0, verbose=False)
    module, samples = Seeing(), token_pairs(16)
    replicas = 2 if (layout or "").startswith("zero") else 1
    sampler: Any = None
    if replicas > 1:
        sampler = DistributedSampler(samples, 2, rank, shuffle=False)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy_of(layout) if layout else "auto",
        max_epochs=2,
        precision="64-true",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(".", filename="in_the_run", every_n_train_steps=3)],
    )
    trainer.fit(module, DataLoader(samples, 8 // replicas, sampler=sampler))
    trainer.save_checkpoint("after.ckpt")
    saved = []
    for name in ("in_a_hook", "in_the_run", "after"):
        file = torch.load(f"{name}.ckpt", weights_only=False)
        (optimizer,) = file["optimizer_states"]
        weights = {name: float(value.norm()) for name, value in file["state_dict"].items()}
        rate = optimizer["param_groups"][0]["lr"]
        saved.append([weights, sums(optimizer["state"]), rate, float(file["of_mine"].sum())])
    return module.found, saved


@cache
def one_process() -> Any:
    try:
        return fit(None, 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)


def _fit_rank(rank: int, world: int, layout: str) -> Any:
    return fit(layout, rank, world)


def flat(found: Any) -> Any:
    """Give the structure and the numbers of a nest."""
    leaves, structure = tree_flatten(found)
    return str(structure), leaves


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "zero2_offload"])
def test_a_hook_on_a_checkpoint_sees_that_of_one_process(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    structure, numbers = flat(one_process())
    for found in run_ranks(_fit_rank, world_of(layout), layout, timeout=180):
        got = flat(found)
        assert got[0] == structure
        assert got[1] == pytest.approx(numbers, rel=1e-6)
