"""Ranks that run out of memory say what held it, and the first change that they advise fits.

Each death is provoked by a limit of the address space (RLIMIT_AS), set when the training begins.
The change is taken from the message and applied, and the same limit then holds the run.
"""

import re
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import Hybrid3DStrategy, linear_cross_entropy
from lightning_par.callbacks import ActivationCheckpointing
from lightning_par.commands.why import why
from lightning_par.errors import ConfigurationError, OutOfMemoryError
from lightning_par.models import GPTModule, TextDataModule
from lightning_par.planner import block_trace
from lightning_par.profiling.post_mortem import PostMortem, read_post_mortems
from lightning_par.strategies.post_mortem import memory_death
from lightning_par.strategies.processes.watchdog import RankWatch
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, run_ranks

MIB = 2**20
SHALLOW = {"num_layers": 1, "model_dim": 32, "num_heads": 2, "max_length": 512}
SIZES: dict[str, dict[str, Any]] = {
    "long": {"num_layers": 8, "model_dim": 64, "num_heads": 2, "max_length": 512},
    "logits": {**SHALLOW, "vocab_size": 32768},
    "leak": {"num_layers": 1, "model_dim": 32, "num_heads": 2, "max_length": 512},
    "states": {"num_layers": 16, "model_dim": 256, "num_heads": 4, "max_length": 512},
    "save": {"num_layers": 16, "model_dim": 256, "num_heads": 4, "max_length": 512},
}
"""Death -> sizes of its model."""
TOKENS = {"states": 8, "save": 8}
"""Death -> tokens of a sample, where not 512."""
ROOM = {"long": 150, "logits": 600, "leak": 350, "states": 170, "save": 300}
"""Death -> MiB that there are for the training."""


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Leaking(GPTModule):
    """Keeps a second loss of every step, which has no backward; with its graph, or detached."""

    detaches = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        second = super().training_step(batch, batch_idx)
        self.kept.append(second.detach() if self.detaches else second)
        return super().training_step(batch, batch_idx)


class Limit(Callback):
    """Limits the address space when a training begins."""

    def __init__(self, room: int) -> None:
        self.room = room

    def on_train_start(self, *_: Any) -> None:
        limit = address_space() + self.room * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def fit(trainer: pl.Trainer, module: pl.LightningModule, data: Any) -> str:
    """Train; return what a lack of memory says, or nothing if all steps have run."""
    try:
        trainer.fit(module, data)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def run(rank: int, world: int, folder: str, death: str, change: str) -> str:
    """Train under the limit of a death, with a change."""
    callbacks: list[Callback] = [Limit(ROOM[death])]
    batch, accumulated, sizes = 8, 1, dict(SIZES[death])
    strategy: dict[str, Any] = {"async_save": True} if death == "save" else {}
    made = Leaking if death == "leak" else GPTModule
    if mode := re.search(r'ActivationCheckpointing\("(\w+)"\)', change):
        callbacks.append(ActivationCheckpointing(mode[1]))
    elif cut := re.search(r"batch_size=(\d+) and accumulate_grad_batches=(\d+)", change):
        batch, accumulated = int(cut[1]), int(cut[2])
    elif "chunked_loss=True" in change:
        sizes["chunked_loss"] = True
    elif "async_save=False" in change:
        strategy["async_save"] = False
    elif "self.kept: append value.detach()" in change:
        Leaking.detaches = True
    else:
        assert not change
    if death == "save":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1))
    trainer = quiet_trainer(
        devices=world,
        strategy=Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=1, **strategy),
        max_steps=30 if death == "leak" else 3,
        limit_val_batches=0,
        logger=CSVLogger(folder, version=0),
        callbacks=callbacks,
        enable_checkpointing=death == "save",
        accumulate_grad_batches=accumulated,
    )
    data = TextDataModule(length=TOKENS.get(death, 512), batch_size=batch)
    return fit(trainer, made(preset="tiny", overrides=sizes), data)


def died(folder: Path, death: str, world: int = 1) -> tuple[str, PostMortem]:
    said, *_ = run_ranks(run, world, str(folder), death, "", timeout=100, fresh=True)
    return said, read_post_mortems(folder)[0]


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        ("long", "activations of 8 samples of 512 tokens"),
        ("logits", "logits over a vocabulary of 32,768 of 8 samples of 512 tokens"),
        ("leak", "memory that is kept from step to step: each of the last"),
        ("save", "a checkpoint that is being saved"),
    ],
)
def test_the_first_change_fits_where_a_step_did_not(
    death: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, found = died(tmp_path, death)
    assert f"Cause: {cause}" in found.summary
    assert found.summary in said
    if death in ("long", "logits"):
        assert found.fits
        # Of a module that the forecast describes, counted weights are those of the forecast.
        assert found.counted["weights"] == pytest.approx(found.forecast["weights"], rel=0.1)
    if death == "leak":
        assert "; self.kept holds" in found.summary
    why(str(tmp_path))
    assert found.summary in capsys.readouterr().out
    assert run_ranks(
        run, 1, str(tmp_path), death, found.changes[0].write, timeout=100, fresh=True
    ) == [""]


def test_states_are_named_and_nothing_is_said_to_fit_where_nothing_does(tmp_path: Path) -> None:
    said, found = died(tmp_path, "states")
    assert "Cause: states and work memory of the optimizer, which its first step makes" in said
    assert not found.fits
    # Smaller batches would not help there: the activations are gone.
    assert not found.changes
    assert "use more devices, or a smaller model" in said
    missing = found.forecast["optimizer states"] - found.counted["optimizer states"]
    assert missing > 0.1 * found.forecast["optimizer states"]


class Wide(pl.LightningModule):
    """A model of which no configuration tells the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def run_wide(rank: int, world: int, folder: str, batch: int, accumulated: int) -> str:
    trainer = quiet_trainer(
        devices=1,
        strategy=Hybrid3DStrategy(),
        max_steps=2,
        logger=CSVLogger(folder, version=0),
        callbacks=[Limit(280)],
        accumulate_grad_batches=accumulated,
    )
    return fit(trainer, Wide(), DataLoader(TensorDataset(torch.randn(32_000, 256)), batch))


def test_a_step_is_traced_where_no_configuration_tells_the_sizes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(run_wide, 1, folder, 16_000, 1, fresh=True)
    (found,) = read_post_mortems(tmp_path)
    assert "Cause: activations of 16,000 samples." in found.summary
    change = re.search(
        r"batch_size=(\d+) and accumulate_grad_batches=(\d+)", found.changes[0].write
    )
    assert change
    assert found.fits
    assert run_ranks(run_wide, 1, folder, int(change[1]), int(change[2]), fresh=True) == [""]


class Words(pl.LightningModule):
    """A language model without a configuration, whose head is larger than all of its blocks."""

    def __init__(self, *, chunked: bool) -> None:
        super().__init__()
        self.chunked = chunked
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 32) for _ in range(2))
        self.head = nn.Linear(32, 32768, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.table(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        if self.chunked:
            return linear_cross_entropy(hidden, self.head.weight, batch[0])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_words(rank: int, world: int, folder: str, chunked: bool) -> str:
    trainer = quiet_trainer(
        devices=1,
        strategy=Hybrid3DStrategy(),
        max_steps=2,
        logger=CSVLogger(folder, version=0),
        callbacks=[Limit(700)],
    )
    data = DataLoader(TensorDataset(torch.randint(64, (16, 512))), 8)
    return fit(trainer, Words(chunked=chunked), data)


def test_logits_of_a_model_of_ones_own_are_named_and_a_chunked_loss_fits(tmp_path: Path) -> None:
    run_ranks(run_words, 1, str(tmp_path), False, fresh=True)
    (found,) = read_post_mortems(tmp_path)
    logits = "logits over a vocabulary of 32,768 of 8 samples of 512 tokens"
    assert f"Cause: {logits}" in found.summary
    assert found.fits
    assert any("linear_cross_entropy" in change.write for change in found.changes)
    assert run_ranks(run_words, 1, str(tmp_path), True, fresh=True) == [""]


class Frozen(GPTModule):
    """Not all of its weights are trained, which no configuration tells."""

    def configure_model(self) -> None:
        super().configure_model()
        next(self.parameters()).requires_grad_(False)


class LimitOfOne(Limit):
    """Limits rank 1 alone."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank:
            super().on_train_start()


def explained_late(*_: Any) -> None:
    time.sleep(8)
    raise ConfigurationError("LP907", "nothing is forecast here")


def run_frozen(rank: int, world: int, folder: str, late: bool) -> str:
    """Train on ranks whose memory is short, or that of rank 1, which then explains it late."""
    trainer = quiet_trainer(
        devices=world,
        strategy=Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=3),
        max_steps=2,
        limit_val_batches=0,
        logger=CSVLogger(folder, version=0),
        callbacks=[(LimitOfOne if late else Limit)(ROOM["logits"])],
    )
    module = Frozen(preset="tiny", overrides=SIZES["logits"])
    with ExitStack() as stack:
        stack.enter_context(patch.object(block_trace, "run_forked", side_effect=AssertionError))
        if late:
            stack.enter_context(patch.object(memory_death, "forecast_step", explained_late))
        return fit(trainer, module, TextDataModule(length=512, batch_size=16))


def test_one_of_several_ranks_traces_no_step_in_a_fork(tmp_path: Path) -> None:
    texts = run_ranks(run_frozen, 2, str(tmp_path), False, timeout=100, fresh=True)
    for rank, (said, found) in enumerate(zip(texts, read_post_mortems(tmp_path), strict=True)):
        assert found.rank == rank
        assert f"rank {rank} (dp_shard {rank}): {found.summary}" in said
        assert (
            "The peak of this step cannot be predicted: the step of Frozen would have to be traced"
            in said
        )


def test_others_are_told_before_a_rank_explains_what_held_its_memory(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(run_frozen, 2, str(tmp_path), True, timeout=100, fresh=True)
    found = read_post_mortems(tmp_path)[0]
    assert found.rank == 0
    # Not yet the explanation.
    assert "rank 1 (dp_shard 1) raised RuntimeError: " in found.summary
    assert "can't allocate memory" in found.summary


class Raising(GPTModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank and batch_idx:
            raise KeyError("of rank 1")
        return super().training_step(batch, batch_idx)


def fail(rank: int, world: int, folder: str) -> None:
    trainer = quiet_trainer(
        devices=world,
        strategy=Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=1),
        max_steps=3,
        limit_val_batches=0,
        logger=CSVLogger(folder, version=0),
    )
    trainer.fit(Raising(preset="tiny"), TextDataModule(length=8, batch_size=4))


def fail_on_a_slow_disk(rank: int, world: int, folder: str) -> None:
    """Rank 1 raises and stays, so that the thread of rank 0 has to end it."""

    def hang(*_: Any) -> None:
        time.sleep(600)

    stack = ExitStack()
    if rank:
        stack.enter_context(patch.object(RankWatch, "explain", hang))
    else:
        stack.enter_context(patch.object(memory_death, "write_post_mortem", hang))
    with stack:
        fail(rank, world, folder)


def test_a_folder_that_hangs_keeps_no_rank_from_its_end(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="KeyError: 'of rank 1' in training_step") as told:
        run_ranks(fail_on_a_slow_disk, 2, str(tmp_path), timeout=100, fresh=True)
    assert "did not answer" not in str(told.value)
    assert not list(tmp_path.rglob("post_mortem*"))


def test_a_rank_that_missed_another_one_leaves_which_it_was(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(fail, 2, str(tmp_path), timeout=100, fresh=True)
    (found,) = read_post_mortems(tmp_path)
    assert (found.rank, found.name) == (0, "rank 0 (dp_shard 0)")
    assert "rank 1 (dp_shard 1) raised KeyError: 'of rank 1' in training_step" in found.summary
