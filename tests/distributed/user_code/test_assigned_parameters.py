"""Parameters, and what is made of them, in attributes that steps and hooks assign."""

import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from tests.distributed.user_code.test_hooks import rate_of
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)


class Keeping(PlainModule):
    """Keeps a weight for the end of the step, at which a mesh has registered nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.world_size > 1:
            assert "kept" not in self._parameters
            assert all("." in name for name in self.state_dict())
        del self.kept


@CASES.add(equal="tp2 zero3", large="zero1 zero1tp2")
def a_weight_that_a_step_keeps() -> Any:
    class Module(Keeping):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kept = self.net.head.weight
            loss = self.loss(batch) + 0.1 * self.kept.square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="tp2 zero3", large="zero1 zero1tp2")
def a_weight_that_a_step_keeps_without_gradients() -> Any:
    class Module(Keeping):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.kept = self.net.head.weight
            loss = super().training_step(batch, batch_idx)
            return loss * (1 + 0.1 * self.kept.detach().square().mean())

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2")
def weights_that_a_hook_detaches() -> Any:
    class Module(PlainModule):
        def on_train_batch_start(self, *_: Any) -> None:
            for name in ("emb", "head"):  # of the first stage and of the last one
                weight = self.net.get_submodule(name).weight
                setattr(self, f"{name}_now", weight.detach())
                setattr(self, f"{name}_saved", self.net.state_dict()[f"{name}.weight"])
                setattr(self, f"{name}_before", weight.detach().clone())
                assert isinstance(weight, nn.Parameter)
            assert not self._parameters

        def on_train_batch_end(self, *_: Any) -> None:
            moved = (self.emb_now - self.emb_before).norm() + self.head_saved.norm()
            rate_of(self, float(moved) + float((self.head_now - self.head_before).norm()))

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2 zero0")
def a_probe_and_centroids_that_a_hook_makes_anew() -> Any:
    class Module(PlainModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.probe = nn.Linear(3, 1)
            self.centroids = nn.Parameter(torch.ones(2, 3) / (1 + batch_idx), requires_grad=False)
            rate_of(self, self.probe(self.centroids).detach().norm())
            if self.global_step == 4:
                del self.probe, self.centroids

    return Module(), token_pairs()


@CASES.add(equal="zero1 zero3 tp2")
def a_weight_that_is_read_again_and_then_written() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            norm = self.net.head.weight.detach().norm()
            with torch.no_grad():
                self.loss(batch)
                self.net.head.weight.clamp_(-0.1, 0.1)
            return super().training_step(batch, batch_idx) + 0 * norm

    return Module(), token_pairs()


@CASES.add(refused={"zero1": r"Read the weight again directly before you write"})
def a_weight_that_is_written_and_then_read_again() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            bias = self.net.head.bias
            with torch.no_grad():
                self.loss(batch)
                bias.mul_(0.5)
            return super().training_step(batch, batch_idx) + self.net.head.bias.square().mean()

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)


class KeepsList(PlainModule):
    """Collects its weights in the first step, for a penalty in all steps."""

    weights: list[Tensor] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.weights is None:
            self.weights = [self.net.head.weight, self.net.norm.weight]
        penalty = sum(weight.square().mean() for weight in self.weights)
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class KeepsLate(PlainModule):
    """Collects one after the model has run."""

    weights: list[Tensor] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.weights is None:
            self.weights = [self.net.head.weight]
        return loss + 0.1 * self.weights[0].square().mean()


class KeepsName(PlainModule):
    """As the warning advises; and an attribute that each step sets anew is no matter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = dict(self.named_parameters())["net.head.weight"]
        return super().training_step(batch, batch_idx) + 0.1 * self.last.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def _told_kept(rank: int, world: int, kind: type[PlainModule], layout: str) -> list[str]:
    seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=False)
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaders = [DataLoader(token_pairs(), 8)] * 2
        trainer.fit(kind().double(), *loaders)
    return [str(each.message) for each in caught if "which an earlier step" in str(each.message)]


def test_a_weight_that_an_attribute_keeps_for_later_steps_is_named() -> None:
    found = [run_ranks(_told_kept, 2, kind, "tp2", timeout=180) for kind in (KeepsList, KeepsLate)]
    for told in chain.from_iterable(found):
        assert told[0].startswith("the attribute weights holds the weight net.head.weight, which")
    # Of ZeRO the gathered weight is the same in every step.
    for kind, layout in ((KeepsList, "zero3"), (KeepsName, "tp2")):
        assert run_ranks(_told_kept, 2, kind, layout, timeout=180) == [[], []]
