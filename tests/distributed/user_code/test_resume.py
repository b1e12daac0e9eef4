"""Runs that go on from a checkpoint: hooks, states and weights are those of one process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy, load_from_checkpoint
from lightning_par.errors import CheckpointError
from tests.support.exhaustive import some
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS

_LARGE = pytest.mark.exhaustive
_CELLS = [
    ("one", True),
    ("tp2", True),
    ("pp2", True),
    ("zero3", False),
    *(
        pytest.param(layout, proves, marks=_LARGE)
        for layout in ("tp2", "pp2", "zero1", "zero3", "tp2pp2", "offload")
        for proves in (False, True)
    ),
]
_OFFLOAD = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "offload_options": {}}


class Rounds(pl.Callback):
    """Counts epochs in its state, and scales the loss by what it was told before the fit."""

    def __init__(self, events: list[Any]) -> None:
        self.rounds, self.events = 0, events

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events.append(("callback loads its state", state["rounds"]))
        self.rounds = state["rounds"]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        # The module has its weights by now.
        norm = sum(float(p.detach().square().sum()) for p in module.parameters())
        self.events.append(("callback sees the checkpoint", norm))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.events.append(("fit starts", self.rounds))
        module.factor = 1 / (1 + self.rounds)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.rounds += 1


class Data(pl.LightningDataModule):
    """Leaves out what its state says was given before."""

    def __init__(self, layout: str | None, events: list[Any]) -> None:
        super().__init__()
        self.layout, self.events, self.given = layout, events, 0
        self.samples = token_pairs()

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events.append(("data module loads its state", state["given"]))
        self.given = state["given"]

    def train_dataloader(self) -> DataLoader[Any]:
        replicas = 2 if str(self.layout).startswith(("zero", "offload")) else 1
        samples = self.samples[self.given :]
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        sampler: Any = None
        if replicas > 1:
            sampler = DistributedSampler(samples, replicas, rank, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(samples, 8 // replicas, sampler=sampler)

    test_dataloader = train_dataloader


class Story(PlainModule):
    """Keeps the length of its schedule in the checkpoint, and edits what it goes on from."""

    factor, total = 1.0, 20

    def __init__(self, data: Data, *, edits: bool) -> None:
        super().__init__()
        self.data, self.edits = [data], edits  # in a list: no copy of the proof follows it

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = self.factor * (1 + self.current_epoch) * (1 + 0.1 * batch_idx)
        return self.loss(batch) * scale * (1 + 0.01 * self.global_step)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.data[0].events.append(("optimizer is made", self.total))
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        rule = lambda n, of=self.total: max(0.1, 1 - n / of)  # noqa: E731
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rule)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["total"] = self.total
        checkpoint["own"] = {"kept": torch.arange(3.0)}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.data[0].events.append(("module sees the checkpoint", checkpoint["own"]["kept"]))
        self.total = checkpoint["total"]
        if not self.edits:
            return
        (optimizer,) = checkpoint["optimizer_states"]
        for group in optimizer["param_groups"]:
            group["weight_decay"] = 0.2
        for entry in optimizer["state"].values():
            entry["exp_avg"].mul_(0.5)  # in place
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
        weights = checkpoint["state_dict"]
        weights["net.norm.weight"].add_(0.1)
        weights.update(weights.copy() | {"net.norm.bias": weights["net.norm.bias"] + 0.1})


def _trainer(layout: str | None, *, proves: bool, **options: Any) -> pl.Trainer:
    given = _OFFLOAD if layout == "offload" else LAYOUTS.get(layout or "", LAYOUTS["zero0"])
    return quiet_trainer(
        proves=proves,
        devices={None: 1, "one": 1, "tp2pp2": 4}.get(layout, 2),
        strategy="auto" if layout is None else Hybrid3DStrategy(**given),
        precision="64-true",
        num_sanity_val_steps=0,
        **options,
    )


def _story(layout: str | None, folder: Path, *, proves: bool) -> dict[str, Any]:
    for epochs in (1, 3):
        seed_everything(0, verbose=False)
        events: list[Any] = []
        data = Data(layout, events)
        module = Story(data, edits=epochs > 1).double()
        module.total = 20 if epochs == 1 else 7
        callbacks: list[pl.Callback] = [Rounds(events)]
        trainer = _trainer(layout, proves=proves, max_epochs=epochs, callbacks=callbacks)
        source = folder / f"{layout}.ckpt" if epochs > 1 else None
        trainer.fit(module, data, ckpt_path=source)
        data.given = 8
        trainer.save_checkpoint(folder / f"{layout}.ckpt")
        data.given = 0
    found = {"events": events, "fit": _state(folder / f"{layout}.ckpt")}
    # Lightning may keep what is logged in float32.
    found["metrics"] = round(trainer.test(module, data, verbose=False)[0]["test_loss"], 6)
    trainer.save_checkpoint(folder / f"{layout}.ckpt")
    return {**found, "after test": _state(folder / f"{layout}.ckpt")}


def _state(path: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=False)
    return {k: v for k, v in saved.items() if k in ("state_dict", "optimizer_states", "own")}


def _story_of_rank(rank: int, world: int, layout: str, folder: str, proves: bool) -> Any:
    return _story(layout, Path(folder), proves=proves)


@pytest.mark.parametrize(("layout", "proves"), _CELLS)
def test_hooks_states_and_edits_of_a_resumed_run_are_those_of_one_process(
    layout: str, proves: bool, tmp_path: Path
) -> None:
    wanted = _story(None, tmp_path, proves=False)
    world = {"one": 1, "tp2pp2": 4}.get(layout, 2)
    order = [name for name, _ in wanted["events"]]
    wanted["events"] = [value for _, value in wanted["events"]]
    for found in run_ranks(_story_of_rank, world, layout, str(tmp_path), proves, timeout=180):
        assert [name for name, _ in found["events"]] == order
        found["events"] = [value for _, value in found["events"]]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


class Unfreezing(BaseFinetuning):
    """Trains the blocks from the second epoch on, as a group of their own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.blocks, optimizer, lr=0.05)


class Momentum(PlainModule):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


def _unfreeze(layout: str | None, folder: Path) -> dict[str, Any]:
    for epochs in (2, 4):
        seed_everything(0, verbose=False)
        data, module = Data(layout, []), Momentum().double()
        callbacks: list[pl.Callback] = [Unfreezing()]
        trainer = _trainer(layout, proves=False, max_epochs=epochs, callbacks=callbacks)
        path = folder / f"{layout}.ckpt"
        trainer.fit(module, data, ckpt_path=path if epochs > 2 else None)
        trainer.save_checkpoint(path)
    return _state(path)  # with all groups; after a run a rank of a pipeline holds its own part


def _unfreeze_rank(rank: int, world: int, layout: str, folder: str) -> Any:
    return _unfreeze(layout, Path(folder))


@pytest.mark.parametrize("layout", some(["tp2", "zero3", "pp2", "one", "zero1"], ["one", "zero1"]))
def test_a_callback_that_has_added_a_group_of_parameters_resumes(
    layout: str, tmp_path: Path
) -> None:
    wanted = _unfreeze(None, tmp_path)
    world = 1 if layout == "one" else 2
    for found in run_ranks(_unfreeze_rank, world, layout, str(tmp_path), timeout=180):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


class Regrouped(PlainModule):
    """The same weights with Adam, in two groups."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)


class Adam(PlainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _with_another_optimizer(
    rank: int, world: int, kind: type[PlainModule], layout: str | None, folder: str
) -> Any:
    """Train with one optimizer; go on with another, with the weights alone.

    Returns:
        The text of the refusal of the whole checkpoint, which one process does not ask for; the
        weights.
    """
    seed_everything(0, verbose=False)
    path, told = f"{folder}/{layout}.ckpt", ""

    def fit(module: PlainModule, **options: Any) -> pl.Trainer:
        trainer = _trainer(layout, proves=False, max_epochs=1)
        torch.manual_seed(1)
        trainer.fit(module, Data(layout, []), **options)
        return trainer

    fit(Momentum()).save_checkpoint(path)
    if layout is not None:
        with pytest.raises(CheckpointError) as caught:
            fit(kind(), ckpt_path=path)
        told = str(caught.value)
    module = load_from_checkpoint(kind, path)
    fit(module)
    return told, module.state_dict()


@pytest.mark.parametrize(
    ("kind", "layout", "refusal"),
    [
        (Regrouped, "pp2", "has 1 parameter groups, but that of this run has 2"),
        (Adam, "zero2_offload", "Use that optimizer without offloading, or load only the weights"),
    ],
)
def test_weights_alone_go_on_with_another_optimizer(
    kind: type[PlainModule], layout: str, refusal: str, tmp_path: Path
) -> None:
    ((_, wanted),) = run_ranks(_with_another_optimizer, 1, kind, None, str(tmp_path))
    for told, weights in run_ranks(_with_another_optimizer, 2, kind, layout, str(tmp_path)):
        assert refusal in told
        assert "LP507" in told
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-9)


def _with_fewer_batches(rank: int, world: int, folder: str) -> int:
    """Save inside of an epoch; go on with a loader that ends where that was."""
    path = f"{folder}/middle.ckpt"
    for steps, samples in ((4, 64), (6, 32)):
        seed_everything(0, verbose=False)
        strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=1)
        trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=steps, proves=True)
        data = DataLoader((token_pairs() * 2)[:samples], 8)
        trainer.fit(Adam(), data, ckpt_path=path if steps > 4 else None)
        trainer.save_checkpoint(path)
    return trainer.global_step


def test_a_run_goes_on_with_a_loader_that_ends_where_it_was(tmp_path: Path) -> None:
    """The proof's own loop had no batch to come, and no end."""
    assert run_ranks(_with_fewer_batches, 2, str(tmp_path), timeout=180) == [6, 6]
