"""Optimizers that update each entry alone: they step on shards, and hooks see DTensors."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.user_code import strategy_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adam": {"lr": 0.01, "foreach": True, "amsgrad": True},
    "Adamax": {"lr": 0.01},
    "Adadelta": {},
    "Adagrad": {"lr": 0.01, "initial_accumulator_value": 0.1},
    "ASGD": {"lr": 0.1},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
}


class Dispatched(TorchDispatchMode):
    """Notes whether operations that write to lists or states meet DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("_foreach_lerp", "_foreach_addc", "_fused_")):
            self.kinds |= {isinstance(tensor, DTensor) for tensor in args[0]}
        return func(*args, **(kwargs or {}))


class Module(PlainModule):
    """Steps by an optimizer of torch, and notes what its hooks see."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.optimizer = name
        self.seen: list[set[bool]] = []
        self.dispatched = Dispatched()

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.optimizer)
        made = kind(self.parameters(), **OPTIMIZERS[self.optimizer])
        made.register_step_pre_hook(self.look)
        made.register_step_post_hook(self.look)
        return made

    def look(self, optimizer: Any, *_: Any) -> None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        assert optimizer.state.keys() <= held
        values = [v for state in optimizer.state.values() for v in state.values()]
        shapes = [v for v in values if isinstance(v, torch.Tensor) and v.ndim]
        self.seen.append({isinstance(tensor, DTensor) for tensor in [*held, *shapes]})

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with self.dispatched:
            super().optimizer_step(*args, **kwargs)


def fit(module: pl.LightningModule, layout: str | None, **options: Any) -> pl.Trainer:
    strategy, world = strategy_of(layout), 1 if layout is None else 2
    defaults: dict[str, Any] = {"max_steps": 4, "precision": "64-true"}
    trainer = quiet_trainer(devices=world, strategy=strategy, **{**defaults, **options})
    trainer.fit(module, DataLoader(token_pairs(), batch_size=8 // (1 + (layout == "zero3"))))
    return trainer


def save_each(rank: int, world: int, layout: str | None, folder: Path) -> None:
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        module = Module(name)
        trainer = fit(module, layout)
        trainer.save_checkpoint(folder / name)
        if layout is not None:
            assert len(module.seen) == 8
            assert all(kinds == {True} for kinds in module.seen), "hooks see DTensors"
            assert True not in module.dispatched.kinds
            assert module.dispatched.kinds or name not in ("AdamW", "Adam"), "nothing was seen"


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_states_and_weights_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / layout).mkdir()
    run_ranks(save_each, 1, None, tmp_path / "one")
    run_ranks(save_each, 2, layout, tmp_path / layout)
    for name in OPTIMIZERS:
        one, two = (torch.load(tmp_path / each / name) for each in ("one", layout))
        for key, value in one["state_dict"].items():
            torch.testing.assert_close(two["state_dict"][key], value, rtol=1e-9, atol=1e-10)
        wanted, found = (each["optimizer_states"][0]["state"] for each in (one, two))
        assert wanted.keys() == found.keys()
        for number, states in wanted.items():
            assert states.keys() == found[number].keys()
            for key, value in states.items():
                torch.testing.assert_close(found[number][key], value, rtol=1e-9, atol=1e-10)


class Failing(Module):
    """Its learning rate makes the second update raise an exception, in the optimizer."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            optimizer.param_groups[0]["lr"] = "large"


class Unfreezing(Module):
    """Trains the head alone at first; the blocks come as a group of their own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.head.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            blocks = list(self.net.blocks.parameters())
            self.optimizers().optimizer.add_param_group({"params": blocks})


class OnException(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        pl_module.look(trainer.optimizers[0])


@ranks(2)
def test_parameters_are_back_after_an_update_that_failed(rank: int, world: int) -> None:
    module = Failing("AdamW")
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        fit(module, "zero3", callbacks=[OnException()])
    # Two hooks of the first step, one of the second, and the callback.
    assert module.seen == [{True}] * 4


class Tasks(Module):
    """Puts the states of a first task aside, trains another one, and takes them back."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            self.aside = dict(optimizer.state)
            optimizer.state.clear()
        if batch_idx == 3:
            optimizer.state.update(self.aside)


def train_tasks(rank: int, world: int, layout: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = fit(Tasks("SGD"), layout)
    state: dict[str, Any] = trainer.lightning_module.state_dict()
    return state


def test_states_that_are_put_aside_stay_as_they_are() -> None:
    (wanted,) = run_ranks(train_tasks, 1, None)
    for found in run_ranks(train_tasks, 2, "tp2"):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10)


@ranks(2)
def test_groups_that_come_later_step_on_shards_too(rank: int, world: int) -> None:
    module = Unfreezing("AdamW")
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = fit(module, "tp2", max_steps=4)
    moved = {n for n, p in module.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert any(name.startswith("net.blocks") for name in moved)
    assert trainer.global_step == 4
