"""Runs that go on inside an epoch, on any layout: every sample that was still to come, once."""

import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from tests.distributed.user_code.test_samples import Net, Rows
from tests.distributed.user_code.test_uncommon_loaders import _REPLICAS, _trainer, _WORLD
from tests.support.exhaustive import some
from tests.support.ranks.api import run_ranks

_SAVED = (1, 2, 6)
"""Steps of three epochs of 4 batches, the last of which is not full; the first is proved."""
_RESUMED = (1, 6)
"""In the first epoch, and two batches into a later one; every step: see the exhaustive test."""


class Noting(Net):
    """Notes the samples of its steps, those of all replicas together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1].tolist())
        return super().training_step(batch, batch_idx)


class Saving(pl.Callback):
    def __init__(self, folder: Path, saved: Sequence[int] = _SAVED) -> None:
        self.folder, self.saved = folder, saved

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.saved:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class Stateful(DataLoader[Any]):
    """Skips the batches that its state says were given, in the order of an epoch that it keeps."""

    epoch = given = 0

    def __iter__(self) -> Any:
        self.generator.manual_seed(self.epoch)  # type: ignore[union-attr]
        skipped, self.given = self.given, 0
        for batch in super().__iter__():
            self.given += 1
            if self.given > skipped:
                yield batch
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Data(pl.LightningDataModule):
    """Leaves out what was given of the epoch, by a state of its own."""

    def __init__(self, layout: str | None) -> None:
        super().__init__()
        self.layout, self.left_out = layout, 0

    def state_dict(self) -> dict[str, int]:
        trainer = self.trainer
        assert trainer is not None
        return {"given": 6 * (trainer.global_step % 4)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left_out = state["given"]

    def train_dataloader(self) -> DataLoader[Any]:
        # The Trainer counts the whole epoch.
        rows = (
            range(22) if not self.left_out else [*range(self.left_out, 22), *range(self.left_out)]
        )
        return DataLoader([Rows(22)[n] for n in rows], 6 // _REPLICAS.get(self.layout or "", 1))


class Eager(BatchSampler):
    """Draws its order when its iterator is made."""

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.sampler)).tolist()  # type: ignore[arg-type]
        size = self.batch_size
        return iter([order[at : at + size] for at in range(0, len(order), size)])


class Endless(Sampler[int]):
    """Has no end, and an attribute named as that of torch's samplers, which is none of torch's."""

    generator = random.Random(3)

    def __iter__(self) -> Any:
        while True:
            yield from torch.randperm(22).tolist()


class Private(Sampler[int]):
    """Draws from a generator of its own, which no checkpoint holds."""

    def __init__(self, seed: int = 3) -> None:
        self.draws = random.Random(seed)

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Any:
        return iter(self.draws.sample(range(22), 22))


class ByEpoch(Private):
    """Computes its order from the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.draws = random.Random(epoch)


class Turned(BatchSampler):
    """A batch sampler that would turn its order by the epoch, which a Trainer does not tell it."""

    turn = 0

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def set_epoch(self, epoch: int) -> None:
        self.turn = epoch

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Any:
        order = [*range(self.turn, self.count), *range(self.turn)]
        return iter([order[at : at + self.size] for at in range(0, self.count, self.size)])


def _loader(layout: str | None, kind: str, many: int) -> Any:
    if kind == "module":
        return Data(layout)
    rows, size = Rows(22), many // _REPLICAS.get(layout or "", 1)
    generator = torch.Generator().manual_seed(7) if kind == "generator" else None
    if kind == "stateful":
        return Stateful(rows, size, shuffle=True, generator=torch.Generator())
    if kind == "endless":
        return DataLoader(rows, size, sampler=Endless())
    if kind == "turned":
        return DataLoader(rows, batch_sampler=Turned(22, size))
    if kind == "by epoch":
        return DataLoader(rows, size, sampler=ByEpoch())
    if kind == "divided" and layout is not None:
        assert not many % 2
        return DataLoader(rows, many // 2, sampler=DistributedSampler(rows, seed=3))
    if kind.startswith("private"):
        return DataLoader(rows, size, sampler=Private(int(kind.split()[1])))
    if kind in ("batches", "eager"):
        sampler = (Eager if kind == "eager" else BatchSampler)(RandomSampler(rows), size, False)
        return DataLoader(rows, batch_sampler=sampler)
    workers = 1 if kind == "workers" else 0
    return DataLoader(rows, size, shuffle=kind != "plain", generator=generator, num_workers=workers)


def _run(layout: str | None, kind: str, folder: str, step: int | None, many: int = 6) -> Any:
    seed_everything(5, verbose=False)
    module = Noting()
    saving = [Saving(Path(folder))] if step is None else []
    many_of = {"limit_train_batches": 4} if kind == "endless" else {}
    trainer = _trainer(layout, max_epochs=3, limit_val_batches=0, callbacks=saving, **many_of)
    path = None if step is None else Path(folder) / f"{step}.ckpt"
    trainer.fit(module, _loader(layout, kind, many), ckpt_path=path, weights_only=False)
    return module.losses, module.head.bias.detach().clone(), module.seen


def _on_rank(rank: int, world: int, *args: Any) -> Any:
    return _run(*args)


_SHOWN = [
    ("zero0", "tp2", "shuffled"),
    ("tp2", "zero0", "shuffled"),
    ("zero3", "dp3", "generator"),
    ("pp2", "pp2dp2", "workers"),
    ("zero0", "zero0", "batches"),
    ("zero0", "tp2", "eager"),
    ("zero0", "tp2", "stateful"),
    ("tp2", "zero0", "module"),
    ("zero0", "tp2", "endless"),
    ("tp2", "zero0", "endless"),
    ("zero0", "tp2", "by epoch"),
    ("tp2", "tp2", "turned"),
]
_CELLS = [
    *_SHOWN,
    *(
        (one, other, kind)
        for one in ("zero0", "dp3", "tp2", "pp2")
        for other in ("zero3", "dp3", "pp2", "pp2dp2", "tp2")
        for kind in ("plain", "generator", "workers")
        if (one, other, kind) not in _SHOWN
    ),
]


@pytest.mark.parametrize("cell", some(_CELLS, large=_CELLS[len(_SHOWN) :]))
def test_an_epoch_goes_on_where_it_was_saved(cell: tuple[str, str, str], tmp_path: Path) -> None:
    saved, resumed, kind = cell
    ((losses, bias, _),) = run_ranks(_on_rank, 1, None, kind, str(tmp_path), None, timeout=60)
    run_ranks(_on_rank, _WORLD.get(saved, 2), saved, kind, str(tmp_path), None, timeout=90)
    for step in _RESUMED:
        args = resumed, kind, str(tmp_path), step
        for found, weight, _ in run_ranks(_on_rank, _WORLD.get(resumed, 2), *args, timeout=90):
            wanted = losses[step:]
            if kind == "module":  # what it left out comes at the end of every epoch
                found, wanted = found[: 4 - step % 4 - 1], wanted[: 4 - step % 4 - 1]
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
            if kind != "module":
                torch.testing.assert_close(weight, bias, rtol=0, atol=1e-8)


def _run_on(rank: int, world: int, layout: str | None, folder: str, steps: Sequence[int]) -> Any:
    """Save at each of some steps, or go on from each: weights at the end."""
    found = []
    for step in steps if steps[0] else (0,):
        seed_everything(5, verbose=False)
        module = Noting()
        saving = [Saving(Path(folder), steps)] if not step else []
        trainer = _trainer(layout, max_epochs=2, limit_val_batches=0, callbacks=saving)
        path = Path(folder) / f"{step}.ckpt" if step else None
        trainer.fit(module, _loader(layout, "shuffled", 6), ckpt_path=path, weights_only=False)
        found.append([p.detach().clone() for p in module.parameters()])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("saves", ["zero0", "tp2"])
def test_every_step_of_two_epochs_goes_on_in_six_layouts(saves: str, tmp_path: Path) -> None:
    steps, folder = range(1, 8), str(tmp_path)
    ((wanted,),) = run_ranks(_run_on, 1, None, folder, [0], timeout=60)
    run_ranks(_run_on, 2, saves, folder, [0, *steps], timeout=120)
    for layout in ("zero0", "zero3", "dp3", "tp2", "pp2", "pp2dp2"):
        world = _WORLD.get(layout, 2)
        for found in run_ranks(_run_on, world, layout, folder, list(steps), timeout=300):
            for weights in found:
                torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-10)


def _resume_warned(rank: int, world: int, *args: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = _run(*args)[2]
    return seen, " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("layout", ["zero0", "tp2"])
def test_an_epoch_whose_order_nobody_knows_begins_again(layout: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(_on_rank, 2, "tp2", "private 3", folder, None, timeout=90)
    found = run_ranks(_resume_warned, 2, layout, "private 5", folder, 6, timeout=90)
    assert "the epoch starts from its beginning" in found[0][1]
    draws = random.Random(5)
    _, wanted = (draws.sample(range(22), 22) for _ in range(2))  # the first was compared
    replicas = 2 if layout == "zero0" else 1
    steps = found[0][0]
    for rank, (seen, _) in enumerate(found):
        assert seen[0] == wanted[:6][rank % replicas :: replicas]
        assert len(seen) == len(steps)


def test_a_distributed_sampler_of_the_user_keeps_its_place(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(_on_rank, 2, "zero3", "divided", folder, None, timeout=90)
    resumed = run_ranks(_resume_warned, 2, "zero3", "divided", folder, 6, timeout=90)
    for (_, _, wanted), (found, warned) in zip(whole, resumed, strict=True):
        assert found == wanted[6:]
        assert "not resumable" not in warned


@pytest.mark.parametrize("many", [4, 9])
def test_another_global_batch_sees_every_sample_that_was_to_come(many: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = run_ranks(_on_rank, 2, "tp2", "shuffled", folder, None, timeout=90)[0][2]
    layout = "zero0" if many == 4 else "dp3"
    found = run_ranks(
        _on_rank, _WORLD.get(layout, 2), layout, "shuffled", folder, 2, many, timeout=90
    )
    rest = -(-(22 - 12) // many)
    seen = [n for _, _, batches in found for batch in batches[:rest] for n in batch]
    todo = [n for batch in before[2:4] for n in batch]
    assert sorted(set(seen)) == sorted(todo)
    epochs = [n for _, _, batches in found for batch in batches[rest:] for n in batch]
    assert set(epochs) == set(range(22))


class Late(Noting):
    """Saves, and makes a batch of its own, in the hooks that come when training is over."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def _save(self, hook: str) -> None:
        self.trainer.save_checkpoint(Path(self.folder) / f"{hook}.ckpt")

    def on_fit_start(self) -> None:
        self.trainer.strategy.batch_to_device((torch.ones(2, 5), torch.ones(2)))

    def on_fit_end(self) -> None:
        self.on_fit_start()
        self._save("end")

    def teardown(self, stage: str) -> None:
        self._save("teardown")


def _save_late(rank: int, world: int, layout: str, folder: str) -> Any:
    seed_everything(5, verbose=False)
    module = Late(folder)
    trainer = _trainer(layout, max_steps=2, limit_val_batches=0)
    trainer.fit(module, _loader(layout, "shuffled", 6))
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    found = []
    for name in ("end", "teardown", "after"):
        seed_everything(5, verbose=False)
        module, path = Noting(), Path(folder) / f"{name}.ckpt"
        trainer = _trainer(layout, max_steps=4, limit_val_batches=0)
        loader = _loader(layout, "shuffled", 6)
        trainer.fit(module, loader, ckpt_path=path, weights_only=False)
        found.append(module.losses)
    return found


def _go_on(rank: int, world: int, layout: str, folder: str) -> Any:
    module, path = Noting(), Path(folder) / "after.ckpt"
    trainer = _trainer(layout, max_steps=2, limit_val_batches=0)
    trainer.fit(module, _loader(layout, "shuffled", 6))
    trainer.save_checkpoint(path)
    whole, resumed = int(trainer.num_training_batches), Noting()
    trainer = _trainer(layout, max_epochs=2, limit_val_batches=0)
    trainer.fit(resumed, _loader(layout, "shuffled", 6), ckpt_path=path, weights_only=False)
    return trainer.global_step, trainer.current_epoch, 2 * whole


@pytest.mark.parametrize("layout", ["zero0", "tp2"])
def test_an_epoch_that_max_steps_has_ended_is_not_counted_twice(
    layout: str, tmp_path: Path
) -> None:
    for steps, epochs, wanted in run_ranks(_go_on, 2, layout, str(tmp_path), timeout=90):
        assert (steps, epochs) == (wanted, 2)


@pytest.mark.parametrize("layout", ["zero0", "tp2"])
def test_what_is_saved_after_training_goes_on_there(layout: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ((losses, _, _),) = run_ranks(_on_rank, 1, None, "shuffled", folder, None, timeout=60)
    for found in run_ranks(_save_late, 2, layout, folder, timeout=90):
        for resumed in found:
            torch.testing.assert_close(resumed, losses[2:4], rtol=0, atol=2e-6)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


class Several(pl.LightningModule):
    """Notes the samples of the loader that is no stream; makes its loaders anew for every epoch."""

    def __init__(self, folder: str | None, *, has_stream: bool) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(5, 1), list[list[int]]()
        self.folder, self.has_stream = folder, has_stream

    def train_dataloader(self) -> Any:
        rows = DataLoader(Rows(24), 3, shuffle=True)
        return CombinedLoader([DataLoader(Stream(), 3), rows] if self.has_stream else [rows])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, numbers = batch[-1]
        self.seen.append(numbers.tolist())
        return self.layer(rows.to(self.layer.weight.dtype)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.folder and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(Path(self.folder) / "2.ckpt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def _run_several(rank: int, world: int, folder: str, has_stream: bool, saves: bool) -> Any:
    seed_everything(5, verbose=False)
    module = Several(folder if saves else None, has_stream=has_stream)
    trainer = _trainer(
        "zero0", max_epochs=2, limit_val_batches=0, reload_dataloaders_every_n_epochs=1
    )
    trainer.fit(module, ckpt_path=None if saves else Path(folder) / "2.ckpt", weights_only=False)
    return module.seen


@pytest.mark.parametrize("resumed", ["the same", "one loader fewer"])
def test_each_of_several_loaders_goes_on_where_it_was(resumed: str, tmp_path: Path) -> None:
    folder, keeps = str(tmp_path), resumed == "the same"
    before = run_ranks(_run_several, 2, folder, True, True, timeout=90)
    found = run_ranks(_run_several, 2, folder, keeps, False, timeout=90)
    for whole, rest in zip(before, found, strict=True):
        if keeps:
            assert rest[:2] == whole[2:4]
    # The epoch after it sees every sample.
    assert sorted(n for rest in found for batch in rest[-4:] for n in batch) == [*range(24)]
