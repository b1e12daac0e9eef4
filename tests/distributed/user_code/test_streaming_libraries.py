"""Streams of litData, WebDataset, datasets and torchdata: every sample once, on every layout.

They are large, and not part of what the tests install:

    pip install "lightning-par[streams]"
    pytest tests/distributed/user_code/test_streaming_libraries.py

mosaicml-streaming is not among them: its versions up to 0.13 need transformers < 5, and
torchvision, of which the package index has no build for torch without CUDA.
"""

import io
import tarfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {**ONE, "tensor_parallel_size": 2}),
    "pp2": (2, {**ONE, "pipeline_parallel_size": 2}),
    "zero1": (2, {**ONE, "zero_stage": 1}),
    "zero1tp2": (4, {**ONE, "tensor_parallel_size": 2, "zero_stage": 1}),
}
COUNT = 32
MODULES = {
    "litdata": "litdata",
    "webdataset": "webdataset",
    "datasets": "datasets.distributed",
    "torchdata": "torchdata.stateful_dataloader",
}


def sample(number: int) -> Tensor:
    return torch.full((4,), float(number))


def item(number: int) -> dict[str, Any]:
    return {"x": np.full(4, number, np.float32)}


def write(library: str, folder: Path) -> None:
    """Write the samples in the form of a library."""
    if library == "litdata":
        import_module("litdata").optimize(
            fn=item,
            inputs=list(range(COUNT)),
            output_dir=str(folder),
            chunk_size=4,
            num_workers=1,
            verbose=False,
        )
    elif library == "webdataset":
        for shard in range(8):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for number in range(shard * 4, shard * 4 + 4):
                    buffer = io.BytesIO()
                    np.save(buffer, item(number)["x"])
                    info = tarfile.TarInfo(f"{number}.x.npy")
                    info.size = buffer.tell()
                    tar.addfile(info, io.BytesIO(buffer.getvalue()))


def loader(library: str, folder: str, workers: int, batch: int) -> Any:
    """Return a loader as the pages of the library show it."""
    module = import_module(MODULES[library])
    options: dict[str, Any] = {"batch_size": batch, "num_workers": workers}
    if library == "litdata":
        return module.StreamingDataLoader(module.StreamingDataset(folder, shuffle=False), **options)
    if library == "webdataset":
        shards = [f"{folder}/{shard}.tar" for shard in range(8)]
        data = module.WebDataset(shards, nodesplitter=module.split_by_node, shardshuffle=False)
        return DataLoader(data.decode().to_tuple("x.npy").map(_named), **options)
    if library == "datasets":
        stream = import_module("datasets").IterableDataset
        made = stream.from_generator(_rows, gen_kwargs={"n": [*range(COUNT)]})
        own = module.split_dataset_by_node(made, dist.get_rank(), dist.get_world_size())
        return DataLoader(own, **options)
    return module.StatefulDataLoader([{"x": sample(n)} for n in range(COUNT)], **options)


def _named(found: tuple[Any]) -> dict[str, Tensor]:
    return {"x": torch.from_numpy(np.array(found[0]))}


def _rows(n: list[int]) -> Any:
    for number in n:
        yield {"x": sample(number).tolist()}


class Module(LightningModule):
    """Notes the samples that it sees."""

    def __init__(self, library: str, folder: str, workers: int, batch: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.made, self.seen = (library, folder, workers, batch), list[int]()

    def train_dataloader(self) -> Any:
        return loader(*self.made)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        x = batch["x"] if isinstance(batch["x"], Tensor) else torch.stack(batch["x"], 1)
        self.seen += [int(row[0]) for row in x]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.until_3 = list(self.seen)
            self.trainer.save_checkpoint(f"{self.made[1]}/at_3.ckpt")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if isinstance(batch["x"], Tensor) else torch.stack(batch["x"], 1)
        return self.layers(x.float() / COUNT).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def see(
    rank: int, world: int, library: str, layout: str, folder: str, workers: int, stops: bool
) -> Any:
    replicas = 2 if layout.startswith("zero1") else 1
    seen: list[int] = []
    for path in (None, f"{folder}/at_3.ckpt")[: 1 + stops]:
        module = Module(library, folder, workers, 4 // replicas)
        trainer = quiet_trainer(
            strategy=Hybrid3DStrategy(**LAYOUTS[layout][1]), devices=world, max_epochs=1
        )
        trainer.fit(module, ckpt_path=path, weights_only=False)
        seen += module.until_3 if stops and path is None else module.seen
    return seen, trainer.strategy.mesh.data_rank


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", MODULES)
def test_every_sample_comes_once(library: str, layout: str, workers: int, tmp_path: Path) -> None:
    pytest.importorskip(library)
    write(library, tmp_path)
    check(library, layout, tmp_path, workers, stops=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["tp2", "zero1"])
@pytest.mark.parametrize("library", ["litdata", "torchdata"])
def test_an_epoch_goes_on(library: str, layout: str, workers: int, tmp_path: Path) -> None:
    """Their loaders have a state, which a checkpoint holds."""
    pytest.importorskip(library)
    write(library, tmp_path)
    check(library, layout, tmp_path, workers, stops=True)


def check(library: str, layout: str, folder: Path, workers: int, *, stops: bool) -> None:
    world, replicas = LAYOUTS[layout][0], 2 if layout.startswith("zero1") else 1
    found = run_ranks(see, world, library, layout, str(folder), workers, stops, timeout=180)
    by_replica: list[list[int]] = [[] for _ in range(replicas)]
    for seen, replica in found:
        assert by_replica[replica] in ([], seen)  # the ranks of a replica see the same
        by_replica[replica] = seen
    counted = Counter(number for seen in by_replica for number in seen)
    assert counted == dict.fromkeys(range(COUNT), 1)
