"""The form of a loss: what changes it, and what does not."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.strategies.step.loss_form import (
    choices_of,
    form_of,
    FormWatch,
    LossGraph,
    sides_of,
    takes_all,
)


def losses(seed: int, samples: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, 7, 5, generator=generator, requires_grad=True)
    labels = torch.randint(5, (samples, 5), generator=generator)
    return F.cross_entropy(logits, labels, reduction="none").mean(1)


def test_other_numbers_and_sizes_have_the_same_form() -> None:
    forms = {
        form_of(LossGraph.of(losses(seed, n).mean() * 0.3), n)
        for seed, n in ((0, 4), (1, 4), (2, 3))
    }
    assert len(forms) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda t: t.sum(),
        lambda t: t.topk(2).values.mean(),
        lambda t: t.mean() + t.var(),
        lambda t: t[t > t.min()].mean(),
        lambda t: t.mean() + 0.5 * t.max(),
        lambda t: torch.add(t.mean(), t.max(), alpha=0.0),
    ],
)
def test_another_way_to_join_samples_is_another_form(loss) -> None:
    assert form_of(LossGraph.of(loss(losses(0))), 4) != form_of(LossGraph.of(losses(0).mean()), 4)


def test_a_factor_of_zero_is_another_form_than_any_other_factor() -> None:
    made = {
        factor: form_of(
            LossGraph.of(losses(0).mean() + factor * losses(0).max()), 4, reads_factors=True
        )
        for factor in (0.0, 0.5, 1.0)
    }
    assert made[0.0] != made[0.5] == made[1.0]


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        (lambda t: (t.mean() - 1).abs() + 1, [("AbsBackward", False)], [("AbsBackward", True)]),
        (
            lambda t: t.mean() + F.relu(t.sum() - 1),
            [("ReluBackward", False)],
            [("ReluBackward", True)],
        ),
        (
            lambda t: t.mean().clamp(0.9, 1.1),
            [("ClampBackward", True, False)],
            [("ClampBackward", False, True)],
        ),
        (
            lambda t: torch.maximum(t.mean(), torch.tensor(1.0)),
            [("MaximumBackward", False)],
            [("MaximumBackward", True)],
        ),
        (lambda t: F.relu(t - 1).max(), [("MaxBackward", False)], [("MaxBackward", True)]),
        (lambda t: t.clamp(min=1).relu().mean(), [], []),
        (lambda t: t.square().mean(), [], []),
    ],
)
def test_sides_of_numbers(loss, low, high) -> None:
    for value, wanted in ((0.1, low), (3.0, high)):
        samples = torch.full((4,), value, requires_grad=True)
        assert list(sides_of(LossGraph.of(loss(samples)))) == wanted


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (
            lambda t: (t * (t > 1)).sum() / (t > 1).sum().clamp(min=1),
            ["DivBackward", "MulBackward"],
        ),
        (lambda t: t[t > 1].mean(), ["MeanBackward"]),
        (lambda t: torch.where(t > 1, t, 0).mean(), ["WhereBackward"]),
        (lambda t: (t / t.detach()).mean() * 0.5, []),
    ],
)
def test_what_may_choose_samples(loss, names) -> None:
    assert [name for name, _ in choices_of(LossGraph.of(loss(losses(0))))] == names


def test_top_k_of_a_part_that_has_no_more_samples() -> None:
    values = torch.rand(4, requires_grad=True)
    taken = [
        takes_all(LossGraph.of(values[:n].topk(min(3, n)).values.mean()), n) for n in (1, 2, 3, 4)
    ]
    assert taken == [True, True, True, False]
    classes = torch.rand(1, 3, requires_grad=True)
    assert not takes_all(LossGraph.of(classes.topk(3).values.mean()), 1)


def chosen(values: list[float], least: float) -> Tensor:
    each = torch.tensor(values, requires_grad=True)
    mask = (each > least).double()
    return (each * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize(
    ("later", "is_new"),
    [([0.1, 0.2], False), ([0.1, 0.8], True), ([0.9, 0.8], True)],
)
def test_a_step_that_begins_to_choose_samples_is_looked_at(later, is_new) -> None:
    form, looks = FormWatch(torch.device("cpu")), list[str]()
    form.has_to_stay, form.again = True, lambda _: looks.append("again")
    for values in ([0.1, 0.2], [0.3, 0.2], later):
        loss = chosen(values, 0.5)
        form.see(loss, 2, None)
        is_marked = bool(form.marked(loss).isnan())
        form.end(is_judged=True)
    assert is_marked == is_new


def test_tokens_of_rows_of_another_length_are_no_choice() -> None:
    form = FormWatch(torch.device("cpu"))
    form.has_to_stay = True
    for length in (5, 7, 6):
        losses_of = torch.rand(2, length, requires_grad=True)
        loss = losses_of.sum() / losses_of.numel()
        form.see(loss, 2, None)
        assert bool(form.marked(loss).isfinite())
        form.end(is_judged=True)


def marks(form: FormWatch, loss: Tensor, counts: float | None = None) -> bool:
    """Return whether a step of one part is marked, whose rule of the loss says what it weighs."""
    weights = None
    if counts is not None:
        count = torch.tensor([counts])
        zero = frozenset([0] if counts == 0 else [])
        weights = BatchWeights(
            scales=(count[0],), total=count[0], samples=None, shares=count, zero=zero, counts=count
        )
    form.see(loss, 2, weights)
    is_marked = bool(form.marked(loss.detach().nan_to_num()).isnan())
    form.end(is_judged=True)
    return is_marked


@pytest.mark.parametrize("first", [True, False])
def test_a_part_in_which_nothing_counts_is_not_compared(first) -> None:
    """It is the first one, or a later one; the loss divides by 0, or by a bound."""
    form = FormWatch(torch.device("cpu"))
    form.has_to_stay = True
    empty = [(torch.zeros(3), 0.0), (torch.zeros(3), None)]
    parts = [(torch.ones(3), 3.0), (torch.tensor([1.0, 1.0, 0.0]), 2.0)]
    for mask, counts in [*empty, *parts] if first else [parts[0], *empty, parts[0]]:
        each = torch.rand(3, requires_grad=True)
        divisor = mask.sum().clamp(min=1) if counts == 0 else mask.sum()
        marked = marks(form, (each * mask).sum() / divisor, counts)
        assert marked == (first and mask is parts[1][0])


def test_what_a_checkpoint_would_compute_anew_is_not_read() -> None:
    runs = list[int]()

    def chunk(each: Tensor, mask: Tensor) -> Tensor:
        runs.append(1)
        return (each.exp() * mask).sum() + (each * mask).topk(3).values.sum()

    form = FormWatch(torch.device("cpu"))
    form.has_to_stay = True
    for step in range(3):
        each = torch.rand(3, requires_grad=True)
        mask = torch.tensor([1.0, 1.0, step % 2])
        count = mask.sum()
        loss = sum(checkpoint(chunk, each, mask, use_reentrant=False) for _ in range(2)) / count
        assert [name for name, _ in choices_of(LossGraph.of(loss))] == ["DivBackward"]
        marks(form, loss)
        assert not takes_all(LossGraph.of(loss), 3)
    assert len(runs) == 6


def test_a_step_that_is_not_judged_is_warned_of_once() -> None:
    form = FormWatch(torch.device("cpu"))
    form.has_to_stay = True
    form.see(chosen([0.7, 0.8], 0.5), 2, None)
    form.end(is_judged=False)
    form.see(chosen([0.1, 0.8], 0.5), 2, None)
    with pytest.warns(UserWarning, match="have changed"):
        form.end(is_judged=False)
    form.see(chosen([0.8, 0.1], 0.5), 2, None)
    form.end(is_judged=False)  # warnings are errors here
