"""Each step confirms over how many labels its loss is a mean."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.strategies.step.loss_form import Confirmed, FormWatch


def loss_of(labels: Tensor, **options: str) -> Tensor:
    return F.cross_entropy(torch.randn(4, 9, requires_grad=True), labels, **options)  # type: ignore[arg-type]


def watch(*, of_labels: bool = True, ratios: tuple[float, ...] = (1.0,)) -> FormWatch:
    form = FormWatch(torch.device("cpu"))
    form.confirms = Confirmed("the mean over 'y' != -100", frozenset(ratios), of_labels)
    return form


def weights(count: float) -> BatchWeights:
    return replace(BatchWeights.of_samples([4]), counts=torch.tensor([count], dtype=torch.float64))


LABELS = torch.tensor([3, 1, -100, 8])


@pytest.mark.parametrize(("count", "is_right"), [(3, True), (4, False), (0, False)])
def test_a_loss_of_another_number_of_labels_marks_the_step(count: int, is_right: bool) -> None:
    form, loss = watch(), loss_of(LABELS)
    form.see(loss, 4, weights(count))
    assert bool(form.marked(loss).isfinite()) == is_right


def test_numbers_may_be_a_multiple_of_what_the_rule_gives() -> None:
    form, loss = watch(ratios=(1.5, 7.0)), loss_of(LABELS)
    form.see(loss, 4, weights(2))
    assert bool(form.marked(loss).isfinite())


def test_a_ratio_is_learned_from_the_first_step() -> None:
    form, loss = watch(ratios=()), loss_of(LABELS)
    form.see(loss, 4, weights(6))
    assert bool(form.marked(loss).isfinite())
    form.see(loss, 4, weights(3))
    assert bool(form.marked(loss).isnan())


def test_a_divisor_is_a_number_like_that() -> None:
    losses = loss_of(LABELS, reduction="none")
    form, loss = watch(of_labels=False), losses.sum() / torch.tensor(3.0)
    form.see(loss, 4, weights(3))
    assert bool(form.marked(loss).isfinite())
    form.see(loss, 4, weights(2))
    assert bool(form.marked(loss).isnan())


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_step_that_nobody_judges_is_warned_of(is_judged: bool) -> None:
    form, loss = watch(), loss_of(LABELS)
    form.see(loss, 4, weights(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        form.end(is_judged=is_judged)
    assert len(caught) == (not is_judged)
    assert bool(form.marked(loss).isfinite()), "the next step begins anew"
