"""Attributes that blocks change when they run, and hooks read: on a pipeline they are told."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Keeps(nn.Module):
    """A block that counts its batches and keeps what it has seen last."""

    def __init__(self, inner: nn.Module, in_buffers: bool) -> None:
        super().__init__()
        self.inner, self.scale, self.last, self.in_buffers = inner, 0.1, None, in_buffers
        if in_buffers:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = 0

    def forward(self, x: Tensor) -> Any:
        self.last = x.detach().std()
        self.seen += 1
        return self.inner(x)


class Reading(PlainModule):
    """Computes learning rates from attributes of its blocks."""

    in_buffers = False

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Keeps(b, self.in_buffers) for b in self.net.blocks)

    def parallel_plan(self) -> ParallelPlan:
        return replace(super().parallel_plan(), tensor={})

    def set_rate(self, total: float) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + 0.01 * total


class Counts(Reading):
    def on_train_batch_end(self, *_: Any) -> None:
        self.set_rate(float(sum(block.seen for block in self.net.blocks)))


class InBuffers(Counts):
    in_buffers = True


class Last(Reading):
    def on_train_batch_end(self, *_: Any) -> None:
        self.set_rate(float(sum(block.last or 0 for block in self.net.blocks)))


class Unchanged(Reading):
    def on_train_batch_end(self, *_: Any) -> None:
        self.set_rate(sum(block.scale for block in self.net.blocks))


def _train(rank: int, world: int, kind: type[Reading], layout: str) -> Any:
    seed_everything(0, verbose=False)
    strategy = "auto" if world == 1 else Hybrid3DStrategy(**LAYOUTS[layout])
    options = {"precision": "64-true", "max_steps": 3, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(devices=world, strategy=strategy, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind().double(), DataLoader(token_pairs(), 8))
    told = [str(each.message) for each in caught if "changes the attribute" in str(each.message)]
    return told, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize(("kind", "name"), [(Counts, "seen"), (Last, "last")])
def test_an_attribute_that_a_hook_reads_is_told_with_the_cure(
    kind: type[Reading], name: str
) -> None:
    (told, _), (others, _) = run_ranks(_train, 2, kind, "pp2", timeout=180)
    assert len(told) == 1
    assert f"{name} of net.blocks.0 (and 3 more" in told[0]
    assert f"self.register_buffer({name!r}" in told[0]
    assert others == []


def test_the_cure_gives_the_rate_of_one_process() -> None:
    ((_, alone),) = run_ranks(_train, 1, InBuffers, "", timeout=180)
    for told, rate in run_ranks(_train, 2, InBuffers, "pp2", timeout=180):
        assert (told, rate) == ([], pytest.approx(alone))


@pytest.mark.parametrize(("kind", "layout"), [(Unchanged, "pp2"), (Counts, "tp2")])
def test_a_hook_that_reads_what_every_rank_has_is_not_told(
    kind: type[Reading], layout: str
) -> None:
    ((_, alone),) = run_ranks(_train, 1, kind, "", timeout=180)
    for told, rate in run_ranks(_train, 2, kind, layout, timeout=180):
        assert (told, rate) == ([], pytest.approx(alone))
