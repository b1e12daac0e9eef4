"""Weights that a step keeps for later ones, or writes to past autograd in late steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__, blocks=2)
_LATE = r"writes to net\.head\.weight through a tensor that it read before"
_KEPT = r"attribute weights keeps net\..*, which an earlier step has read"
_EIGHT = {"max_steps": 8}


class Penalized(PlainModule):
    """Adds the square of the head's weight to its loss, and halves the weight in late steps."""

    def halve(self, weight: Tensor) -> None:
        if self.global_step > 5:
            weight.data.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net.head.weight
        penalty = weight.square().sum() / 1000
        self.halve(weight)
        loss = self.loss(batch) + penalty
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(equal="tp2 zero3", large="zero1tp2", trainer=_EIGHT, strategy={"verify": False})
def data_that_a_late_step_changes() -> Any:
    return Penalized(), token_pairs(64)


@CASES.add(equal="tp2", trainer=_EIGHT)
def detached_data_that_a_late_step_changes() -> Any:
    class Module(Penalized):
        def halve(self, weight: Tensor) -> None:
            super().halve(weight.detach())

    return Module(), token_pairs(64)


@CASES.add(refused={"tp2 zero3": _LATE}, trainer=_EIGHT)
def data_that_a_late_step_changes_behind_the_model() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weight = self.net.head.weight
            loss = super().training_step(batch, batch_idx)
            if self.global_step > 5:
                weight.data.mul_(0.5)
            return loss

    return Module(), token_pairs(64)


@CASES.add(refused={"tp2 zero3": _LATE}, strategy={"verify": False})
def data_that_is_read_before_the_model_and_changed_behind_it() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            data = self.net.head.weight.data
            loss = super().training_step(batch, batch_idx)
            data.mul_(0.5)
            return loss

    return Module(), token_pairs()


class Keeping(PlainModule):
    """Collects its matrices once, for a penalty in each step."""

    weights: list[Tensor] | None = None

    def matrices(self) -> list[Tensor]:
        if self.weights is None:
            self.weights = [p for p in self.parameters() if p.ndim > 1]
        return self.weights

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + sum(w.square().sum() for w in self.matrices()) / 100
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(refused={"tp2 zero3": _KEPT})
def weights_that_a_step_keeps_for_later_ones() -> Any:
    return Keeping(), token_pairs()


@CASES.add(equal="tp2 zero3")
def names_of_weights_that_a_step_keeps() -> Any:
    class Module(Keeping):
        names: list[str] | None = None

        def matrices(self) -> list[Tensor]:
            if self.names is None:
                self.names = [n for n, p in self.named_parameters() if p.ndim > 1]
            found = dict(self.named_parameters())
            return [found[name] for name in self.names]

    return Module(), token_pairs()


@CASES.add(equal="tp2")
def a_weight_that_each_step_puts_into_an_attribute() -> Any:
    class Module(Keeping):
        def matrices(self) -> list[Tensor]:
            self.weights = [self.net.head.weight]
            return self.weights

    return Module(), token_pairs()


@CASES.add(refused={"tp2": r"autograd\.grad for parameters.*manual_backward"})
def a_gradient_of_one_weight_in_manual_optimization() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            (grad,) = torch.autograd.grad(loss, [self.net.head.weight], retain_graph=True)
            optimizer.zero_grad()
            self.manual_backward(loss * (1 + grad.norm()))
            optimizer.step()

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
