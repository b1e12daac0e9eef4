"""`on_save_checkpoint` sees the checkpoint of one process, in a run and after it; what it writes
there is saved.
"""

from collections.abc import Callable
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

TABLE, HEAD = "net.emb.weight", "net.head.weight"


def sums(states: Any) -> dict[Any, float]:
    return {number: float(state["exp_avg"].abs().sum()) for number, state in states.items()}


class Seeing(PlainModule):
    """Reads weights and states from its checkpoints, and writes to them."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.found: list[Any] = []
        if tied:
            self.net.head.weight = self.net.emb.weight

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


def fit(layout: str | None, tied: bool, rank: int, world: int) -> Any:
    seed_everything(0, verbose=False)
    module, samples = Seeing(tied=tied), token_pairs(16)
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
def one_process(tied: bool) -> Any:
    try:
        return fit(None, tied, 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)


def _fit_rank(rank: int, world: int, layout: str, tied: bool) -> Any:
    return fit(layout, tied, rank, world)


def flat(found: Any) -> Any:
    """Give the structure and the numbers of a nest."""
    leaves, structure = tree_flatten(found)
    return str(structure), leaves


@pytest.mark.parametrize(
    ("layout", "tied"),
    [("tp2", False), ("pp2", False), ("pp2", True), ("zero3", False), ("zero2_offload", False)],
)
def test_a_hook_on_a_checkpoint_sees_that_of_one_process(
    layout: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    structure, numbers = flat(one_process(tied))
    for found in run_ranks(_fit_rank, world_of(layout), layout, tied, timeout=180):
        got = flat(found)
        assert got[0] == structure
        assert got[1] == pytest.approx(numbers, rel=1e-6)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another head": lambda weights: weights.update({HEAD: weights[TABLE] * 2}),
    "another table": lambda weights: weights.update({TABLE: weights[HEAD] * 2}),
    "a plain head": lambda weights: weights.update({HEAD: torch.zeros(64, 32)}),
    "no head": lambda weights: weights.pop(HEAD),
    "no table": lambda weights: weights.pop(TABLE),
    "all in half": lambda weights: {name: value.half() for name, value in weights.items()},
    "other names": lambda weights: {f"ema.{name}": value for name, value in weights.items()},
}
"""What a hook does to a state dict in which the head is the table; it may return another one."""


class Editing(PlainModule):
    """Changes a name of a tied weight in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight = self.net.emb.weight
        self.edit = ""

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        found = EDITS[self.edit](checkpoint["state_dict"])
        if isinstance(found, dict):
            checkpoint["state_dict"] = found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for self.edit in EDITS:
            self.trainer.save_checkpoint(f"{self.edit} {self.trainer.global_step}.ckpt")


def fit_edited(layout: str | None, rank: int, world: int) -> Any:
    """Save with each edit, and train on from a checkpoint in which the two names differ."""
    seed_everything(0, verbose=False)
    module, path = Editing(), None
    for step in (1, 2):
        strategy = strategy_of(layout) if layout else "auto"
        trainer = quiet_trainer(
            devices=world, strategy=strategy, precision="64-true", max_steps=step
        )
        trainer.fit(module, DataLoader(token_pairs(8), 8), ckpt_path=path)
        module.edit = path = "another head"
        trainer.save_checkpoint(path)
    files = [f"{edit} {step}.ckpt" for step in (1, 2) for edit in EDITS]
    saved = [torch.load(file, weights_only=False)["state_dict"] for file in [*files, path]]
    return [{n: (str(v.dtype), float(v.double().norm())) for n, v in w.items()} for w in saved]


def _fit_edited_rank(rank: int, world: int, layout: str) -> Any:
    return fit_edited(layout, rank, world)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2", "zero3", "zero2_offload"])
def test_a_hook_changes_one_name_of_a_tied_weight(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        wanted = fit_edited(None, 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in run_ranks(_fit_edited_rank, world_of(layout), layout, timeout=180):
        for got, want in zip(found, wanted, strict=True):
            assert {n: t for n, (t, _) in got.items()} == {n: t for n, (t, _) in want.items()}
            norms = {name: pytest.approx(norm, rel=1e-6) for name, (_, norm) in want.items()}
            assert {name: norm for name, (_, norm) in got.items()} == norms
