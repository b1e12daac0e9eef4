"""Every kind of loader in every loop on every layout sees the samples that one process sees."""

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torchmetrics import CatMetric

from lightning_par import BatchLayout, Hybrid3DStrategy, ParallelPlan
from tests.support.islands import KEY, part_from_other_islands, serving, SYNCHRONOUS
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, run_ranks
from tests.support.user_code import LAYOUTS, world_of

_OPTIONS = {**LAYOUTS, "dp2": LAYOUTS["zero0"], "dp3": LAYOUTS["zero0"]}
_REPLICAS = {"dp2": 2, "dp3": 3, "zero1tp2": 2, "zero3": 2}
_BATCH = 6
"""Samples of a global batch."""


class Texts(Dataset[Any]):
    """Rows of 8 tokens that are known by their numbers."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(11, (size, 8), generator=generator)
        self.targets = torch.randn(size, 8, generator=generator).double()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "tokens": self.tokens[index],
            "targets": self.targets[index],
            "number": torch.full((8,), float(index)).double(),
        }


class Stream(IterableDataset[Any]):
    """Divides its rows among the ranks and workers that it is told."""

    def __init__(self, size: int) -> None:
        self.rows = Texts(size)

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from (self.rows[number] for number in range(rank, len(self.rows), size))


class KeepsItsPlace(DataLoader[Any]):
    """A loader with a state, as that of torchdata."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[..., 0]


_DIMS = dict.fromkeys(("tokens", "targets", "number"), 1)
_PLAN = ParallelPlan(
    blocks="model.blocks", batch=BatchLayout(sequence_dims=_DIMS, labels="targets"), positions={}
)


class Net(pl.LightningModule):
    """Notes in a metric which samples it has seen, which pads of an epoch do not reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.losses = Model(), list[float]()
        self.trained, self.evaluated = CatMetric(), CatMetric()
        self.epochs: list[list[float]] = []

    def _step(self, batch: Any, name: str) -> Tensor:
        parts = list(batch.values()) if "tokens" not in batch else [batch]
        parts = [part for part in parts if part is not None]
        tokens, targets, number = (
            torch.cat([part[key] for part in parts]) for key in ("tokens", "targets", "number")
        )
        training = name == "loss"
        (self.trained if training else self.evaluated).update(number.flatten())
        errors = (self.model(tokens) - targets).square()
        self.log(name, errors.mean(), sync_dist=True, on_step=training, on_epoch=True)
        self.log(f"{name}_sum", errors.sum(), sync_dist=True, reduce_fx="sum", on_epoch=True)
        return errors.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "loss")

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"number": batch["number"], "out": self.model(batch["tokens"])}

    def _note(self, metric: CatMetric) -> None:
        self.epochs.append(sorted(metric.compute().flatten().tolist()))
        metric.reset()

    def on_train_epoch_end(self) -> None:
        self._note(self.trained)

    def on_validation_epoch_end(self) -> None:
        self._note(self.evaluated)

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


_SIZES = {"uneven": 22, "empty replica": 19, "one sample": 1, "dropped": 22, "limits": 22}
_JOINT = ("min_size", "max_size", "max_size_cycle", "sequential")


def loader_of(kind: str, loop: str, batch: int) -> Any:
    """Return the loader of a kind, with batches of `batch` samples."""
    rows = Texts(_SIZES.get(kind, 24))
    if kind in _JOINT:
        loaders = {"a": DataLoader(Texts(18), batch), "b": DataLoader(Texts(24), batch)}
        return CombinedLoader(loaders, kind)
    if kind == "weighted":
        sampler = WeightedRandomSampler(torch.arange(1.0, 25), 24)
        return DataLoader(rows, batch, sampler=sampler)
    if kind == "batch sampler":
        sampled = BatchSampler(RandomSampler(rows), batch, drop_last=False)
        return DataLoader(rows, batch_sampler=sampled)
    if kind == "stream":
        return DataLoader(Stream(24), batch)
    if kind == "stream with state":
        return KeepsItsPlace(Stream(24), batch)
    shuffles = kind not in ("plain", "one sample") and loop == "fit"
    generator = torch.Generator().manual_seed(7) if kind == "generator" else None
    return DataLoader(
        rows,
        batch,
        shuffle=shuffles,
        generator=generator,
        drop_last=kind == "dropped",
        num_workers=2 if kind == "workers" else 0,
    )


_KINDS = (
    *("plain", "shuffled", "weighted", "batch sampler", "stream", "stream with state", *_JOINT),
    *(
        "uneven",
        "empty replica",
        "one sample",
        "dropped",
        "workers",
        "limits",
        "overfit",
        "generator",
    ),
)


def _options(kind: str) -> dict[str, Any]:
    if kind == "limits":
        names = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
        return dict.fromkeys((*names, "limit_predict_batches"), 2)
    return {"overfit_batches": 2} if kind == "overfit" else {}


def run_kind(layout: str | None, kind: str) -> dict[str, Any]:
    """Fit, validate, test and predict with loaders of a kind; give all numbers and samples."""
    batch = _BATCH // _replicas(layout or "")
    found: dict[str, Any] = {}
    for loop in ("fit", "validate", "test", "predict"):
        if kind in _JOINT and (loop == "predict" or (loop, kind) == ("fit", "sequential")):
            continue  # a Trainer refuses the first; the other is made of two equal loaders
        plan = {"plan": _PLAN} if layout == "cp2" else {}  # elsewhere it is inferred
        strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**_OPTIONS[layout], **plan)
        seed_everything(5, verbose=False)
        module = Net()
        trainer = quiet_trainer(
            devices=1 if layout is None else _world(layout),
            strategy=strategy,
            precision="64-true",
            max_epochs=2,
            proves=True,
            **_options(kind),
        )
        loader = loader_of(kind, loop, batch)
        if loop == "fit":
            trainer.fit(module, loader, loader_of(kind, "validate", batch))
            found[loop] = module.losses, trainer.global_step
        elif loop == "predict":
            found[loop] = _joined(trainer.predict(module, loader))
        else:
            getattr(trainer, loop)(module, loader, verbose=False)
        found[f"{loop}, logged"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        found[f"{loop}, samples"] = module.epochs
    return found


def _joined(predictions: Any) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in predictions]) for key in predictions[0]}


def _world(layout: str) -> int:
    return 3 if layout == "dp3" else world_of(layout)


def _replicas(layout: str) -> int:
    return _REPLICAS.get(layout, 1)


def _run_rank(rank: int, world: int, layout: str | None, kind: str) -> Any:
    return run_kind(layout, kind)


@cache
def _wanted(kind: str) -> Any:
    return run_ranks(_run_rank, 1, None, kind, timeout=120)[0]


_SHOWN = [("cp2", "uneven"), ("dp3", "batch sampler"), ("zero3", "empty replica")]
_LARGE = [
    (layout, kind)
    for layout in ("dp2", "dp3", "tp2", "pp2", "zero1tp2", "zero3", "cp2")
    for kind in _KINDS
    if (layout, kind) not in _SHOWN
]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(
    ("layout", "kind"),
    [*_SHOWN, *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in _LARGE)],
)
def test_a_loader_gives_every_loop_what_it_gives_one_process(layout: str, kind: str) -> None:
    wanted = _wanted(kind)
    if layout == "cp2" and kind in _JOINT[:3]:  # which batch has the labels is not to be said
        with pytest.raises(RankError, match=r"names the batch entry 'targets', but .*LP302"):
            run_ranks(_run_rank, 2, layout, kind, timeout=300)
        return
    results = run_ranks(_run_rank, _world(layout), layout, kind, timeout=300)
    if kind.startswith("stream"):  # whose predictions stay with their replica
        parts = [result["predict"] for result in results[:: _world(layout) // _replicas(layout)]]
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        order = joined["number"][:, 0].argsort()
        for result in results:
            result["predict"] = {key: value[order] for key, value in joined.items()}
    for found in results:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6)


def _fit_on_island(folder: Path, outer: dict[str, Any] | None, kind: str, batch: int) -> Any:
    """Return the samples of every epoch, and what validation logged in the last one."""
    strategy: Any = "auto" if outer is None else Hybrid3DStrategy(**LAYOUTS["one"], outer=outer)
    seed_everything(5, verbose=False)
    module = Net()
    trainer = quiet_trainer(
        devices=1, strategy=strategy, precision="64-true", max_epochs=2, **_options(kind)
    )
    trainer.fit(module, loader_of(kind, "fit", batch), loader_of("plain", "validate", _BATCH))
    return module.epochs, float(trainer.callback_metrics["val"])


def _island_rank(rank: int, world: int, folder: Path, outer: dict[str, Any], kind: str) -> Any:
    part_from_other_islands(folder, rank, 0, 1)
    place = {"island": rank, "islands": world, "min_islands": world}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _fit_on_island(folder, {**outer, **place}, kind, _BATCH // world)
    return *found, [str(w.message) for w in caught if "used twice" in str(w.message)]


def _islands(count: int, folder: Path, kind: str) -> list[Any]:
    folder.mkdir()
    (folder / "key").write_bytes(KEY)
    with serving() as server:
        told = {"server": f"127.0.0.1:{server.port}", "key_file": str(folder / "key")}
        outer = {**SYNCHRONOUS, **told, "timeout": 60}
        found: list[Any] = run_ranks(
            _island_rank, count, folder, outer, kind, timeout=120, fresh=True
        )
    return found


_ON_ISLANDS = ("plain", "shuffled", "weighted", "uneven", "empty replica", "overfit")
_MORE_ON_ISLANDS = ("batch sampler", "dropped", "workers", "limits", "generator")


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(
    "kind",
    [*_ON_ISLANDS, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in _MORE_ON_ISLANDS)],
)
def test_islands_see_together_what_one_sees(kind: str, tmp_path: Path) -> None:
    ((wanted, loss, _),) = _islands(1, tmp_path / "one", kind)
    (first, *found), (second, *_) = _islands(2, tmp_path / "two", kind)
    if kind == "empty replica":  # 19 samples
        assert re.search(
            r"has 1 sample, .* 1 of these samples will be used twice, since islands make",
            found[1][0],
        )
        return
    assert found == [pytest.approx(loss, abs=1e-10), []]
    for number, epoch in enumerate(wanted):
        is_training = number in (2, 4)  # after the sanity check, each after its validation
        both = sorted(first[number] + second[number]) if is_training else first[number]
        assert both == epoch
    if kind == "plain":
        plain = _fit_on_island(tmp_path, None, kind, _BATCH)
        assert plain == (wanted, pytest.approx(loss, abs=1e-10))
