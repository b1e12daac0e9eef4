"""A step that asks how far the run is: what it does at its end is known before the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


class Later(PlainModule):
    """Its loss has another form later.

    Args:
        form: A function of the module, its logits and the loss of each sample.
        begins: Whether it has begun.
    """

    batch = BatchLayout()
    lr = 0.05

    def __init__(self, form: Callable[..., Tensor], begins: Callable[[Any], bool]) -> None:
        super().__init__()
        self.form, self.begins = form, begins

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        logits = self.net(tokens)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        return self.form(self, logits, each) if self.begins(self) else each.mean()


def later(
    form: Callable[..., Tensor], begins: Callable[[Any], bool] = lambda m: m.global_step > 1
) -> Any:
    return Later(form, begins), token_pairs()


def hardest(module: Any, logits: Tensor, each: Tensor) -> Tensor:
    return each.topk(len(each) // 2 or 1).values.mean()


_AT_END = r"neither the mean(?s:.)*This happens in step 3, the last step of"


@CASES.add(equal="pp2_one_microbatch tp2", refused={"pp2 zero1": _AT_END})
def hard_samples_from_the_third_step_on() -> Any:
    return later(hardest)


@CASES.add(refused={"zero3": _AT_END}, trainer={"max_epochs": 2, "limit_train_batches": 2})
def hard_samples_in_the_second_epoch() -> Any:
    return later(hardest, lambda module: module.current_epoch == 1)


@CASES.add(equal="zero1", trainer={"max_steps": 2})
def hard_samples_after_the_run_has_ended() -> Any:
    """What the refusal above says: let the run end before."""
    return later(hardest)


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2 zero1": "is the mean over the samples, but in step 3, .* it is the sum over the"},
)
def a_sum_from_the_third_step_on() -> Any:
    return later(lambda module, logits, each: each.sum() / 8)


@CASES.add(equal="tp2 zero1", large="pp2 zero3")
def noise_from_the_third_step_on() -> Any:
    return later(lambda module, logits, each: (logits * torch.randn_like(logits)).mean())


@CASES.add(equal="zero1", large="tp2 pp2")
def noise_for_each_sample_beside_dropout() -> Any:
    def form(module: Any, logits: Tensor, each: Tensor) -> Tensor:
        kept = F.dropout(each, 0.5)
        return (kept * torch.rand(1, len(each)).square()).mean()

    return later(form)


@CASES.add(equal="zero1", refused={"pp2": "on another pipeline stage"})
def a_penalty_on_weights_from_the_third_step_on() -> Any:
    def form(module: Any, logits: Tensor, each: Tensor) -> Tensor:
        return each.mean() + 0.1 * module.net.emb.weight.square().sum()

    return later(form)


@CASES.add(equal="zero1 pp2")
def a_loss_that_asks_and_keeps_its_form() -> Any:
    def form(module: Any, logits: Tensor, each: Tensor) -> Tensor:
        return each.mean() * (1 + module.global_step) + module.current_epoch

    return later(form, lambda module: True)


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


@CASES.add(equal="zero1 pp2", trainer=lambda: {"callbacks": [Stops()], "min_epochs": 0})
def noise_before_a_failure_that_never_comes() -> Any:
    """What the first look has learned of draws stays, if the look at the end fails."""

    def form(module: Any, logits: Tensor, each: Tensor) -> Tensor:
        if module.global_step > 1:
            raise IndexError(module.global_step)
        return each.mean() + (logits * torch.randn_like(logits)).mean()

    return later(form, lambda module: True)


@CASES.add(equal="zero1 pp2", trainer=lambda: {"callbacks": [Stops()], "min_epochs": 0})
def a_step_that_fails_at_an_end_which_never_comes() -> Any:
    def form(module: Any, logits: Tensor, each: Tensor) -> Tensor:
        raise IndexError(module.global_step)

    return later(form)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused_before_the_first_step(
    case: str, layout: str, refusal: str | None
) -> None:
    CASES.check(case, layout, refusal)
