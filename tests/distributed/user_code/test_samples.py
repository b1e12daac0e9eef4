"""Every sample once, in the order of one process whose batches are those of all replicas."""

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn, Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    get_worker_info,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_par import Hybrid3DStrategy
from tests.support.exhaustive import some
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS

_WORLD = {"dp3": 3, "zero1tp2": 4, "pp2dp2": 4}
_REPLICAS = {"dp3": 3, "tp2": 1, "pp2": 1}
_PP2DP2 = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "num_microbatches": 2}
_OPTIONS = {**LAYOUTS, "dp3": LAYOUTS["zero0"], "pp2dp2": {**_PP2DP2, "zero_stage": 1}}


class Rows(Dataset[Any]):
    """Samples that are known by their numbers; `draws` of random numbers go with each."""

    def __init__(self, size: int, *, draws: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.draws = torch.randn(size, 5, generator=generator).double(), draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.draws:
            torch.rand(1 + index % 3)
        return self.x[index], torch.tensor(index)


class Triples(Sampler[list[int]]):
    """Batches of unequal sizes, in an order of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        yield from (order[at : at + 3] for at in range(0, self.size, 3))

    def __len__(self) -> int:
        return -(-self.size // 3)


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.mean = nn.Linear(5, 1), MeanMetric()
        self.area, self.losses = BinaryAUROC(), list[list[float]]()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]

    def _loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - 0.1 * batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("sized", loss, sync_dist=True, batch_size=len(batch[1]))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append([float(self.trainer.callback_metrics[n]) for n in ("loss", "sized")])

    def _evaluate(self, batch: Any) -> None:
        out, many = self(batch[0]), len(batch[1])
        self.mean.update(out)
        self.area.update(out.sigmoid(), batch[1] % 2)
        self.log("val_mean", (out - 0.1 * batch[1]).square().mean(), sync_dist=True)
        self.log("val_sized", out.mean(), sync_dist=True, batch_size=many)
        self.log("val_count", float(many), sync_dist=True, reduce_fx="sum")
        self.log("val_most", out.max(), sync_dist=True, reduce_fx="max")
        self.log("val_least", out.min(), sync_dist=True, reduce_fx="min")
        self.log("val_metric", self.mean)
        self.log("val_area", self.area)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Classes(Net):
    """Its loss is a cross-entropy, whose graph holds how many labels count."""

    def _loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x + self.head(x), batch[1] % 5)


class Early(Net):
    """Asks for the number of steps before it is on the mesh, where the Trainer makes its loader."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.total = hook, 0.0

    def _ask(self, hook: str) -> None:
        if hook == self.hook:
            self.total = self.trainer.estimated_stepping_batches

    def setup(self, stage: str) -> None:
        self._ask("setup")

    def configure_model(self) -> None:
        self._ask("configure_model")


def _loader(kind: str, size: int, batch: int, workers: int = 0) -> DataLoader[Any]:
    rows = Rows(size, draws=kind == "draws")
    generator = torch.Generator().manual_seed(7)
    samplers: dict[str, Any] = {
        "backwards": lambda: Backwards(size),
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, size + 1), size),
    }
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind in samplers:
        return DataLoader(rows, batch, sampler=samplers[kind](), **options)
    if kind == "batches":
        return DataLoader(
            rows, batch_sampler=BatchSampler(RandomSampler(rows), batch, True), **options
        )
    own = generator if kind == "generator" else None
    return DataLoader(
        rows, batch, shuffle=kind != "plain", generator=own, drop_last=kind == "dropped", **options
    )


def _trainer(layout: str | None, **options: Any) -> pl.Trainer:
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**_OPTIONS[layout])
    world = 1 if layout is None else _WORLD.get(layout, 2)
    return quiet_trainer(
        proves=True, devices=world, strategy=strategy, precision="64-true", **options
    )


def _fit(layout: str | None, kind: str, size: int, batch: int, workers: int, **options: Any) -> Any:
    seed_everything(5, verbose=False)
    module = Net()
    trainer = _trainer(layout, max_epochs=3, **options)
    many = batch * (6 if layout is None else 6 // _REPLICAS.get(layout, 2))
    trainer.fit(module, _loader(kind, size, many, workers), _loader("plain", size, many))
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return module.losses, found, trainer.global_step


def _fit_classes(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(5, verbose=False)
    module, many = Classes(), 6 if layout is None else 3
    # The last batch of an epoch has one sample: the second replica repeats it, and counts nowhere.
    _trainer(layout, max_epochs=2).fit(module, _loader("plain", 19, many))
    return module.losses, module.head.bias.detach().clone()


def _fit_early(layout: str | None, hook: str, epochs: int, folder: str) -> Any:
    seed_everything(5, verbose=False)
    module, trainer = Early(hook), _trainer(layout, max_epochs=epochs)
    many = 6 if layout is None else 6 // _REPLICAS.get(layout, 2)
    place = Path(folder) / "saved.ckpt"
    ckpt_path = place if place.exists() else None
    trainer.fit(module, _loader("shuffled", 19, many), ckpt_path=ckpt_path)
    if layout is not None:
        trainer.save_checkpoint(place)
    return module.total, module.losses, module.head.bias.detach().clone()


def _fit_early_rank(rank: int, world: int, *args: Any) -> Any:
    return _fit_early(*args)


def _fit_rank(rank: int, world: int, *args: Any) -> Any:
    *given, options = args
    return _fit(*given, **options)


def _assert_equal(found: Any, wanted: Any) -> None:
    for result in found:
        torch.testing.assert_close(result, wanted, rtol=0, atol=2e-6, equal_nan=True)


_KINDS = ["shuffled", "plain", "backwards", "weighted", "batches", "generator", "dropped"]
_FITS = [
    ("zero1", "shuffled", 19, 0),  # the second replica has no sample in the last batch
    ("dp3", "weighted", 20, 0),
    ("pp2dp2", "shuffled", 19, 0),
    *(
        pytest.param(layout, kind, size, workers, marks=[pytest.mark.exhaustive])
        for layout in ("zero0", "zero3", "dp3", "zero1tp2", "pp2dp2", "tp2", "pp2")
        for kind, size, workers in (*((kind, 19, 0) for kind in _KINDS), ("shuffled", 20, 2))
        if (layout, kind, size) != ("pp2dp2", "shuffled", 19)
    ),
]


@pytest.mark.parametrize(("layout", "kind", "size", "workers"), _FITS)
def test_the_order_of_samples_is_that_of_one_process(
    layout: str, kind: str, size: int, workers: int
) -> None:
    args = kind, size, 1, workers
    wanted = _fit(None, *args)
    world = _WORLD.get(layout, 2)
    _assert_equal(run_ranks(_fit_rank, world, layout, *args, {}, timeout=180), wanted)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_replica_without_a_sample_counts_no_label(layout: str) -> None:
    (wanted,) = run_ranks(_fit_classes, 1, None, timeout=60)
    _assert_equal(run_ranks(_fit_classes, 2, layout, timeout=60), wanted)


@pytest.mark.parametrize(
    ("layout", "hook"),
    [("zero3", "setup"), ("zero1", "configure_model"), ("pp2", "setup")],
)
def test_steps_that_are_asked_for_early_are_those_of_one_process(
    layout: str, hook: str, tmp_path: Path
) -> None:
    given = hook, 3, str(tmp_path)
    ((total, losses, bias),) = run_ranks(_fit_early_rank, 1, None, *given, timeout=60)
    for begun in run_ranks(_fit_early_rank, 2, layout, hook, 2, str(tmp_path), timeout=90):
        _assert_equal([begun[:2]], (8, losses[:8]))
    resumed = run_ranks(_fit_early_rank, 2, layout, *given, timeout=90)
    _assert_equal(resumed, (total, losses[8:], bias))


def _evaluate(layout: str | None, size: int, batch: int, limit: Any) -> Any:
    seed_everything(5, verbose=False)
    module, trainer = Net(), _trainer(layout, limit_val_batches=limit)
    many = batch * (6 if layout is None else 6 // _REPLICAS.get(layout, 2))
    loaders = [_loader("plain", size, many), _loader("plain", size + 2, many)]
    first = trainer.validate(module, loaders, verbose=False)
    return first, trainer.test(module, loaders[0], verbose=False)


def _evaluate_rank(rank: int, world: int, *args: Any) -> Any:
    return _evaluate(*args)


@pytest.mark.filterwarnings("ignore:No positive samples")
@pytest.mark.parametrize(
    "cell",
    some(
        [
            (layout, size, limit)
            for layout in ("zero3", "zero0", "dp3", "pp2dp2", "tp2")
            for size, limit in ((13, 1.0), (1, 1.0), (13, 2))
        ],
        large=[
            (layout, size, limit)
            for layout in ("zero0", "dp3", "pp2dp2", "tp2", "zero3")
            for size, limit in ((13, 1.0), (1, 1.0), (13, 2))
            if (layout, size) not in (("zero3", 13), ("zero0", 1))
        ],
    ),
)
def test_evaluation_counts_each_sample_once(cell: tuple[str, int, Any]) -> None:
    layout, size, limit = cell
    wanted = _evaluate(None, size, 1, limit)
    world = _WORLD.get(layout, 2)
    _assert_equal(run_ranks(_evaluate_rank, world, layout, size, 1, limit, timeout=120), wanted)


class Writer(BasePredictionWriter):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[int] = []
        self.epoch: list[int] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        self.batches += rest[0]

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch += [number for batch in indices[0] for number in batch]


class Predictor(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"number": batch[1].tolist(), "out": self(batch[0])}


def _predict_rank(rank: int, world: int, layout: str | None, size: int, gathers: bool) -> Any:
    writer, module = Writer(), Predictor()
    trainer = _trainer(layout, callbacks=[writer])
    if layout is not None:
        trainer.strategy.options = replace(trainer.strategy.options, gather_predictions=gathers)
    found = trainer.predict(module, _loader("plain", size, 2))
    return found, writer.batches, writer.epoch


@pytest.mark.parametrize(
    "cell",
    some(
        [
            ("zero3", 13, True),
            ("tp2", 13, True),
            *((layout, 13, True) for layout in ("zero0", "dp3", "pp2", "pp2dp2", "zero1tp2")),
            ("dp3", 1, True),
            ("zero0", 13, False),
        ],
        large=[(name, 13, True) for name in ("zero0", "dp3", "pp2", "pp2dp2", "zero1tp2")],
    ),
)
def test_predictions_come_in_order_and_are_written_once(cell: tuple[str, int, bool]) -> None:
    layout, size, gathers = cell
    (wanted, *_) = _predict_rank(0, 1, None, size, True)
    results = run_ranks(_predict_rank, _WORLD.get(layout, 2), layout, size, gathers, timeout=120)
    for number, (found, _, _) in enumerate(results):
        own = wanted if gathers else wanted[number::2]
        torch.testing.assert_close(found, own, rtol=0, atol=1e-10)
    for written in zip(*(result[1:] for result in results), strict=True):
        assert sorted(number for part in written for number in part) == list(range(size))


class Stream(IterableDataset[Any]):
    """Divides itself among the ranks that it is told, as streaming libraries do."""

    def __init__(self, rows: Rows, way: str, told: tuple[int, int] = (0, 1)) -> None:
        self.rows, self.way, self.told = rows, way, told

    def __iter__(self) -> Iterator[Any]:
        rank, size = self.told
        if self.way == "torch" and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        elif self.way == "variables":
            rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1
        yield from (self.rows[number] for number in range(rank, len(self.rows), size))


class Streamed(Net):
    """Makes its stream in the hook."""

    def __init__(self, way: str, batch: int, workers: int) -> None:
        super().__init__()
        self.way, self.batch, self.workers = way, batch, workers

    def setup(self, stage: str) -> None:
        self.place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def val_dataloader(self) -> list[Any]:
        return []

    def train_dataloader(self) -> DataLoader[Any]:
        told = (0, 1)
        if (self.way == "hook" and dist.is_initialized()) or self.way == "unasked":
            told = dist.get_rank(), dist.get_world_size()
        elif self.way == "trainer":
            told = self.trainer.global_rank, self.trainer.world_size
        elif self.way == "setup":
            told = self.place
        stream = Stream(Rows(16), self.way, told)
        return DataLoader(stream, self.batch, num_workers=self.workers)


class Unasked(Streamed):
    """Has no forward, so that its plan comes from samples, which are looked at before there are
    groups of ranks.
    """

    forward = nn.Module.forward

    def _loss(self, batch: Any) -> Tensor:
        return (Net.forward(self, batch[0]) - 0.1 * batch[1]).square().mean()


def _stream(layout: str | None, way: str, workers: int) -> Any:
    seed_everything(5, verbose=False)
    kind = Unasked if way == "unasked" else Streamed
    module = kind(way, 2 if layout == "zero1tp2" else 4, workers)
    trainer = _trainer(layout, max_epochs=2, limit_val_batches=0)
    trainer.fit(module)
    assert layout is None or dist.get_rank() == trainer.global_rank
    return module.losses, trainer.global_step


def _stream_rank(rank: int, world: int, *args: Any) -> Any:
    return _stream(*args)


@pytest.mark.parametrize(
    "cell",
    some(
        [
            *(
                (layout, way, workers)
                for layout in ("tp2", "pp2", "zero1tp2")
                for way in ("torch", "variables", "hook")
                for workers in (0, 1)
            ),
            ("tp2", "trainer", 0),
            ("zero1tp2", "trainer", 0),
            ("zero1tp2", "unasked", 0),
        ],
        large=[
            (layout, way, workers)
            for layout in ("pp2", "zero1tp2", "tp2")
            for way in ("torch", "variables", "hook")
            for workers in (0, 1)
            if (layout, way, workers) not in (("tp2", "torch", 1), ("pp2", "hook", 0))
        ],
    ),
)
def test_a_stream_that_divides_itself_loses_nothing(cell: tuple[str, str, int]) -> None:
    layout, way, workers = cell
    wanted = _stream(None, "hook" if way == "unasked" else way, 0)
    world = _WORLD.get(layout, 2)
    _assert_equal(run_ranks(_stream_rank, world, layout, way, workers, timeout=120), wanted)


def _told_of_stream(rank: int, world: int, layout: str, way: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _stream(layout, way, 0)
    return [str(warning.message) for warning in caught if "from a stream" in str(warning.message)]


@pytest.mark.parametrize(
    ("layout", "way", "text"),
    [
        ("zero0", "none", r"all 2 replicas get the same samples.*distributed_sampler_kwargs"),
        ("tp2", "setup", r"ranks of one replica get different samples.*train_dataloader"),
        ("zero0", "torch", ""),
        ("tp2", "none", ""),
    ],
)
def test_a_stream_that_is_not_divided_is_told(layout: str, way: str, text: str) -> None:
    told = run_ranks(_told_of_stream, 2, layout, way, timeout=60)[0]
    assert len(told) == (1 if text else 0)
    assert all(re.search(text, found) for found in told)
