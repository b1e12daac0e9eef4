"""What a step says and writes to the outside is there as often as in one process."""

import contextlib
import os
import re
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy
from lightning_par.errors import ConfigurationError
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Experiment:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.added.append((name, round(float(value), 6), step))

    def add_text(self, name: str, text: str) -> None:
        self.added.append((name, text))


class KeepingLogger(Logger):
    """A logger as the documentation of Lightning writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.images = Experiment(), list[Any]()

    name, version = "keeping", 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.kept

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Leave what Lightning logs by itself."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Leave them."""

    @rank_zero_only
    def log_image(self, key: str, images: list[float]) -> None:
        self.images.append((key, [round(image, 6) for image in images]))


@rank_zero_only
def note(path: Path, text: str) -> None:
    """Append a line, on the first rank."""
    with path.open("a") as file:
        file.write(f"{text}\n")


class Writing(PlainModule):
    """Writes from its steps by all the ways that users write."""

    folder: Path

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.logger.experiment.add_scalar("loss", loss.detach(), self.global_step)
        if self.global_rank == 0:
            with open(self.folder / "steps", "a") as file:  # noqa: PTH123
                file.write(f"{self.global_step}\n")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.print(f"batch {batch_idx}")
        note(self.folder / "notes", f"{batch_idx}")
        self.logger.experiment.add_text("best", str(logits[0].argmax(-1).tolist()))
        self.logger.log_image("logits", [float(logits[0].softmax(-1)[0, 0]), float(logits.sum())])


class Noting(Callback):
    """Writes a file after each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        note(self.path, "batch")


def _train(
    rank: int,
    world: int,
    layout: str | None,
    folder: str,
    *options: Any,
    kind: type[Writing] = Writing,
) -> Any:
    seed_everything(0, verbose=False)
    module, logger = kind().double(), KeepingLogger()
    module.folder = Path(folder)
    module.folder.mkdir(exist_ok=True)
    (module.folder / "steps").write_text("of a run before\n")
    samples, held = token_pairs(), token_pairs()[:16]
    replicas = 2 if "zero" in (layout or "") else 1
    strategy: Any = "auto"
    if layout is not None:
        strategy = Hybrid3DStrategy(**{**LAYOUTS[layout], **dict(options)})
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=logger,
        callbacks=[Noting(module.folder / "batches")],
        proves=True,
    )
    loaders = (
        DataLoader(
            x, 8 // replicas, sampler=DistributedSampler(x, replicas, rank % replicas, False)
        )
        for x in (samples, held)
    )
    try:
        trainer.fit(module, *loaders)
    finally:
        torch.set_default_dtype(torch.float32)
    return logger.kept.added, logger.images


def _written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def _heard(
    rank: int, world: int, kind: type[Writing], folder: str, layout: str, *options: Any
) -> Any:
    """Train; return what is written, and what is said of it, or why it is refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kept = _train(rank, world, layout, folder, *options, kind=kind)
        except ConfigurationError as error:
            return str(error)
    said = [str(each.message) for each in caught]
    # A look is taken again while the rule of the loss is open, and says the same again.
    return kept, list(dict.fromkeys(each for each in said if "writes to a logger" in each))


@pytest.mark.parametrize(
    ("layout", "options"), [("tp2", []), ("zero1", []), ("pp2", [("num_microbatches", 1)])]
)
def test_a_step_writes_as_often_as_in_one_process(
    layout: str, options: list[Any], tmp_path: Path, capfd: Any
) -> None:
    wanted = _train(0, 1, None, os.fspath(tmp_path / "one"))
    assert len(wanted[0]) == len(token_pairs()) // 8 + 2
    folder = os.fspath(tmp_path / "mesh")
    (found, said), *others = run_ranks(_heard, 2, Writing, folder, layout, *options, timeout=180)
    if layout == "zero1":  # rank 0 writes what its replica has seen, as with DDP
        assert [len(kept) for kept in found] == [len(kept) for kept in wanted]
        assert [each.split()[0] for each in said] == ["training_step", "validation_step"]
    else:
        assert found == wanted
        assert not said
    assert all(other == ([], []) for other, _ in others)
    assert _written(tmp_path / "mesh") == _written(tmp_path / "one")


class WritingFromOutputs(Writing):
    """Writes as it is told to where a step runs for micro-batches: what it returned, in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return {"loss": loss, "best": logits.argmax(-1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_scalar("loss", outputs["loss"], self.global_step)
        self.logger.experiment.add_text("best", str(outputs["best"].tolist()))


class WritingGenerators(Writing):
    """Writes what cannot be sent."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.add_text("rows", (row for row in batch))
        return loss


def test_a_step_on_micro_batches_writes_for_each_which_is_said(tmp_path: Path) -> None:
    added, images = _train(0, 1, None, os.fspath(tmp_path / "one"))
    folder, parts = os.fspath(tmp_path / "mesh"), ("num_microbatches", 2)
    (kept, said), *_ = run_ranks(_heard, 2, Writing, folder, "pp2", parts, timeout=180)
    # Evaluation runs whole batches then.
    assert kept[1] == images
    assert [each for each in kept[0] if each[0] == "best"] == added[-len(images) :]
    one, mesh = _written(tmp_path / "one"), _written(tmp_path / "mesh")
    assert mesh["notes"] == one["notes"]
    first, *steps = one["steps"].splitlines()
    assert mesh["steps"].splitlines() == [first, *(step for step in steps for _ in range(2))]
    means = [(a[1] + b[1]) / 2 for a, b in zip(kept[0][:-2:2], kept[0][1:-2:2], strict=True)]
    assert means == pytest.approx([each[1] for each in added[:-2]], abs=1e-5)
    assert len(said) == 1
    assert "for each of 2 micro-batches" in said[0]

    # As the warning says.
    wanted = _train(0, 1, None, os.fspath(tmp_path / "one, in a hook"), kind=WritingFromOutputs)
    folder = os.fspath(tmp_path / "mesh, in a hook")
    kind = WritingFromOutputs
    (kept, said), *_ = run_ranks(_heard, 2, kind, folder, "pp2", parts, timeout=180)
    assert kept == wanted
    assert not said


def test_what_cannot_be_sent_to_rank_0_is_refused(tmp_path: Path) -> None:
    folder, parts = os.fspath(tmp_path), ("num_microbatches", 2)
    with pytest.raises(BaseException, match="cannot pickle 'generator'"):
        run_ranks(_heard, 2, WritingGenerators, folder, "pp2", parts, timeout=180)


SEEN: list[Any] = []
PLACE = SimpleNamespace(batches=[], count=0)
TOTAL = 0


class Counting(PlainModule):
    """Notes what happens everywhere but in itself, as a short script does."""

    calls = 0
    losses: ClassVar[list[float]] = []
    constants = np.broadcast_to(np.ones(1), 3), torch.ones(1).expand(3)  # nobody can write to them

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global TOTAL
        TOTAL += 1
        type(self).calls += 1
        loss: Tensor = super().training_step(batch, batch_idx)
        SEEN.append(("step", self.global_step))
        PLACE.batches.append(batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SEEN.append(("start", batch_idx))
        PLACE.count += 1


def _count(rank: int, world: int, layout: str | None) -> Any:
    global TOTAL
    seed_everything(0, verbose=False)
    Counting.calls, TOTAL, PLACE.count = 0, 0, 0
    for held in (SEEN, PLACE.batches, Counting.losses):
        held.clear()
    clipped: list[int] = []

    class Closing(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            clipped.append(len(clipped))

    trainer = quiet_trainer(
        devices=world,
        strategy="auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout]),
        precision="64-true",
        max_steps=3,
        callbacks=[Closing()],
        proves=True,
    )
    replicas = 2 if "zero" in (layout or "") else 1
    try:
        trainer.fit(Counting().double(), DataLoader(token_pairs(), 8 // replicas))
    finally:
        torch.set_default_dtype(torch.float32)
    return SEEN, vars(PLACE), Counting.calls, TOTAL, clipped, len(Counting.losses)


@pytest.mark.parametrize("layout", ["tp2", "zero1", "zero3"])
def test_what_a_script_counts_outside_of_its_module_is_as_in_one_process(layout: str) -> None:
    wanted = run_ranks(_count, 1, None)[0]
    found = run_ranks(_count, 2, layout)[0]
    assert len(wanted[0]) == 6
    assert found == wanted


class Sending(Callback):
    """Sends a word to a socket after each batch."""

    def __init__(self, port: int) -> None:
        self.port = port

    def on_train_batch_end(self, *_: Any) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"batch", ("127.0.0.1", self.port))


def _send(rank: int, world: int) -> Any:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        strategy = Hybrid3DStrategy(**LAYOUTS["tp2"])
        sending = Sending(receiver.getsockname()[1])
        trainer = quiet_trainer(
            devices=world, strategy=strategy, max_steps=3, callbacks=[sending], proves=True
        )
        with warnings.catch_warnings(record=True):
            trainer.fit(PlainModule(), DataLoader(token_pairs(), 8))
        receiver.setblocking(False)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while receiver.recv(64):
                count += 1
        return count, strategy.start.proof.outcome


def test_a_hook_sends_to_a_socket_once_and_the_proof_says_that_it_was_not_made() -> None:
    count, outcome = run_ranks(_send, 2)[0]
    assert count == 3
    assert re.search(r"not proved.*socket\.sendto", outcome), outcome
