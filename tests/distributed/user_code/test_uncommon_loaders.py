"""Several loaders at once, overfitting and samplers by rank: equal to one process, or refused."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric

from lightning_par import BatchLayout, Hybrid3DStrategy, ParallelPlan
from tests.distributed.user_code.test_samples import Block, Rows
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, run_ranks
from tests.support.user_code import LAYOUTS

_WORLD = {"dp3": 3, "pp2dp2": 4}
_REPLICAS = {"zero0": 2, "zero3": 2, "dp3": 3, "pp2dp2": 2}
_PP2DP2 = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "num_microbatches": 2}
_OPTIONS = {**LAYOUTS, "dp3": LAYOUTS["zero0"], "pp2dp2": {**_PP2DP2, "zero_stage": 1}}
_BATCH = 6
_SIZES = ((12, 18), (13, 20), (21, 8), (4, 5))
"""Samples of two loaders: divided equally; not at the end; at an end; not in the first step."""


class Pairs(pl.LightningModule):
    """A step takes a batch of every loader that has one.

    Args:
        kind: "mean" over the samples of all, "terms": the sum of a mean of each, "sum".
        is_sized: Whether the loss is logged with a `batch_size`.
    """

    def __init__(self, kind: str = "mean", *, is_sized: bool = False) -> None:
        super().__init__()
        self.is_sized = is_sized
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.kind = nn.Linear(5, 1), kind
        self.losses, self.mean = list[float](), MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]

    def _errors(self, batch: Any) -> list[Tensor]:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        inputs, numbers = zip(*(part for part in parts if part is not None), strict=True)
        # A pipeline passes through each block once.
        errors = (self(torch.cat(inputs)) - 0.1 * torch.cat(numbers)).square()
        return list(errors.split([len(n) for n in numbers])) if self.kind == "terms" else [errors]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        errors = self._errors(batch)
        loss = sum(e.sum() / 20 if self.kind == "sum" else e.mean() for e in errors)
        assert isinstance(loss, Tensor)
        size = {"batch_size": 4} if self.is_sized else {}
        self.log("loss", loss, sync_dist=True, **size)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        errors = torch.cat(self._errors(batch))
        self.mean.update(errors)
        self.log("val", errors.mean(), sync_dist=True)
        self.log("sized", errors.mean(), sync_dist=True, batch_size=len(errors))
        self.log("count", float(len(errors)), sync_dist=True, reduce_fx="sum")
        self.log("most", errors.max(), sync_dist=True, reduce_fx="max")
        self.log("metric", self.mean)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def _trainer(layout: str | None, **options: Any) -> pl.Trainer:
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**_OPTIONS[layout])
    devices = 1 if layout is None else _WORLD.get(layout, 2)
    return quiet_trainer(
        proves=True, devices=devices, strategy=strategy, precision="64-true", **options
    )


def _loader(layout: str | None, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(size), _BATCH // _REPLICAS.get(layout or "", 1), **options)


def _both(layout: str | None, mode: Any, sizes: tuple[int, int], **options: Any) -> CombinedLoader:
    loaders = {n: _loader(layout, s, **options) for n, s in zip("ab", sizes, strict=True)}
    return CombinedLoader(loaders, mode)


def _fit(layout: str | None, data: Any, kind: str = "mean", **options: Any) -> Any:
    seed_everything(5, verbose=False)
    module = Pairs(kind)
    trainer = _trainer(layout, max_epochs=2, limit_val_batches=0, **options)
    trainer.fit(module, data(layout))
    return module.losses, trainer.global_step, module.head.bias.detach().clone()


def _validate(layout: str | None, data: Any, **options: Any) -> Any:
    seed_everything(5, verbose=False)
    return _trainer(layout, **options).validate(Pairs(), data(layout), verbose=False)


_CELLS: dict[str, Any] = {
    **{
        f"train {mode}": [
            lambda layout, m=mode, s=sizes: _fit(layout, lambda of: _both(of, m, s, shuffle=True))
            for sizes in _SIZES
        ]
        for mode in ("min_size", "max_size_cycle", "max_size")
    },
    **{
        f"train {kind}": [
            lambda layout, k=kind: _fit(layout, lambda of: _both(of, "max_size", (13, 20)), k)
        ]
        for kind in ("terms", "sum")
    },
    "train sum, of one loader later": [
        lambda layout: _fit(layout, lambda of: _both(of, "max_size", (5, 24)), "sum")
    ],
    **{
        f"validate {mode}": [
            lambda layout, m=mode, s=sizes: _validate(layout, lambda of: _both(of, m, s))
            for sizes in _SIZES
        ]
        for mode in ("min_size", "max_size_cycle", "max_size", "sequential")
    },
    "validate a list and a dict": [
        lambda layout: _validate(layout, lambda of: [_loader(of, 13), _loader(of, 8)]),
        lambda layout: _validate(layout, lambda of: {"x": _loader(of, 13), "y": _loader(of, 1)}),
    ],
    "workers and limits": [
        lambda layout: _validate(
            layout,
            lambda of: _both(of, "max_size", (13, 20), num_workers=1),
            limit_val_batches=2,
        ),
    ],
    "overfit": [
        lambda layout, part=part: _fit(
            layout, lambda of: _loader(of, 13, shuffle=True), overfit_batches=part
        )
        for part in (1, 3, 0.7)
    ],
}


@cache
def _wanted(name: str) -> Any:
    return run_ranks(_on_rank, 1, None, name, timeout=60)[0]


def _on_rank(rank: int, world: int, layout: str | None, name: str) -> Any:
    return [cell(layout) for cell in _CELLS[name]]


_LARGE = pytest.mark.exhaustive
_SHOWN = [("zero0", name) for name in _CELLS] + [
    ("pp2", "train max_size_cycle"),
    ("pp2", "validate max_size"),
    ("pp2", "train sum, of one loader later"),
    ("pp2dp2", "train sum"),
    ("tp2", "train max_size"),
    ("zero3", "train min_size"),
]
_MORE = [
    (layout, name)
    for layout in ("pp2", "tp2", "zero3", "dp3", "pp2dp2")
    for name in _CELLS
    if (layout, name) not in _SHOWN
]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(
    ("layout", "name"), [*_SHOWN, *(pytest.param(*cell, marks=_LARGE) for cell in _MORE)]
)
def test_loaders_give_what_they_give_one_process(layout: str, name: str) -> None:
    wanted, world = _wanted(name), _WORLD.get(layout, 2)
    for found in run_ranks(_on_rank, world, layout, name, timeout=120):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


class Seen(pl.LightningModule):
    """Notes the samples of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(5, 1), list[list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[1].tolist())
        return self.head(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Ragged(Dataset[Any]):
    """Samples of unequal lengths."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1 + index), torch.tensor(index)


class Lengths(Seen):
    """Takes inputs of any length."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = torch.cat([x.mean(1, keepdim=True) for x, _ in batch.values()])
        return self.head(means.expand(-1, 5)).square().mean()


def _pad(samples: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return inputs.double(), torch.stack([number for _, number in samples])


def _fit_ragged(rank: int, world: int, drops: bool) -> int:
    trainer = _trainer("zero0", max_epochs=1, limit_val_batches=0)
    ragged = DataLoader(Ragged(), 3, collate_fn=_pad, drop_last=drops)
    trainer.fit(Lengths(), CombinedLoader({"a": _loader("zero0", 18), "b": ragged}, "min_size"))
    return trainer.global_step


def test_batches_that_cannot_be_joined_are_refused_with_a_cure_that_works() -> None:
    with pytest.raises(RankError, match=r"from each of 2 data loaders.*drop_last=True.*LP326"):
        run_ranks(_fit_ragged, 2, False, timeout=60)
    assert run_ranks(_fit_ragged, 2, True, timeout=60) == [1, 1]


class Declared(Pairs):
    """Its loaders give a step 6 and 4 samples."""

    def parallel_plan(self) -> ParallelPlan:
        layout = BatchLayout(loss_weight="samples" if self.kind == "terms" else None)
        return ParallelPlan(batch=layout)


def _fit_unequal(
    rank: int, world: int, layout: str | None, declares: bool, sized: bool = False
) -> Any:
    seed_everything(5, verbose=False)
    module = Declared("terms" if declares else "mean", is_sized=sized)
    trainer = _trainer(layout, max_epochs=2)
    many = 2 if layout == "zero0" else 4
    loaders = {"a": _loader(layout, 13), "b": DataLoader(Rows(9), many)}
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"))
    return module.losses, module.head.bias.detach().clone()


@pytest.mark.parametrize("sized", [False, True])
def test_unequal_loaders_are_equal_where_it_is_declared_how_losses_add_up(sized: bool) -> None:
    with pytest.raises(RankError, match=r"unequal numbers of samples in a step, declare.*LP301"):
        run_ranks(_fit_unequal, 2, "zero0", False, timeout=60)
    (wanted,) = run_ranks(_fit_unequal, 1, None, True, sized, timeout=60)
    for layout in ("zero0", "pp2"):
        for found in run_ranks(_fit_unequal, 2, layout, True, sized, timeout=60):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


class ByRank(Sampler[int]):
    """Divides the samples by itself, or shuffles them by a seed of its rank."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def __len__(self) -> int:
        return len(range(self.place[0], self.size, self.place[1] if self.kind == "divides" else 1))

    def __iter__(self) -> Iterator[int]:
        if self.kind == "divides":
            yield from range(self.place[0], self.size, self.place[1])
            return
        seed = 0 if self.kind == "same seed" else self.place[0]
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist()


def _by_rank(layout: str | None, kind: str, divides: bool) -> Any:
    def data(of: str | None) -> DataLoader[Any]:
        return _loader(of, 24, sampler=ByRank(24, kind))

    return _fit(layout, data, use_distributed_sampler=divides)


def _by_rank_on(rank: int, world: int, *args: Any) -> Any:
    return _by_rank(*args)


@pytest.mark.parametrize("kind", ["divides", "other seed"])
def test_samplers_that_differ_are_refused_with_a_cure_that_works(kind: str) -> None:
    with pytest.raises(RankError, match=r"order of samples on each of 2 replicas.*LP324"):
        run_ranks(_by_rank_on, 2, "zero0", kind, True, timeout=60)
    cured = ("zero0", kind, False) if kind == "divides" else ("zero0", "same seed", True)
    (wanted,) = run_ranks(_by_rank_on, 1, None, cured[1], True, timeout=60)
    for found in run_ranks(_by_rank_on, 2, *cured, timeout=60):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
