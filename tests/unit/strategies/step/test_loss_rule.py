"""Laws of the rule by which the loss of a batch is made of the losses of its parts."""

import pytest
import torch
from torch import nn, Tensor

from lightning_par.engine.batch import find_batch_dims, take_samples
from lightning_par.errors import PlanError
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.start.loss_rule import candidate_rules, choose_rule, rule_error
from lightning_par.strategies.step.batch_weights import declared_rule

LABELS = torch.tensor([[3, -100, 5, 7, 1], [-100, -100, 2, -100, -100], [4, 4, 4, 4, 4]])
BATCH = {"x": torch.rand(3, 5), "y": LABELS, "mask": torch.rand(3, 5) < 0.5, "order": [0, 1, 1]}


def errors_of(losses: Tensor, batch: dict, layout: BatchLayout, loss_of) -> dict[str, float]:
    """Errors of all rules for a loss of per-token losses [B, T], on parts of 1 and 2 samples."""
    dims = find_batch_dims(batch, layout)
    rules = candidate_rules(batch, layout, dims, nn.Module())
    rows = [[0, 1, 2], [0], [1, 2]]
    whole, *parts = [float(loss_of(losses[r], take_samples(batch, dims, r))) for r in rows]
    weights = {
        rule.name: [float(rule.weigh(take_samples(batch, dims, r), len(r))) for r in rows[1:]]
        for rule in rules
    }
    return {rule.name: rule_error(rule, whole, parts, weights[rule.name]) for rule in rules}


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda t, b: t.mean(), "the mean over the samples"),
        (lambda t, b: t.mean(1).sum(), "the sum over the samples"),
        (lambda t, b: t[b["y"] != -100].mean(), "the mean over 'y' != -100"),
        (
            lambda t, b: t[:, 1:][b["y"][:, 1:] != -100].mean(),
            "the mean over 'y' != -100 (shifted)",
        ),
        (lambda t, b: t[b["mask"]].mean(), "the mean weighted by 'mask'"),
    ],
)
def test_the_rule_that_a_loss_follows_is_found(loss, name) -> None:
    torch.manual_seed(1)
    losses = torch.rand(3, 5, dtype=torch.float64)
    batch = {**BATCH, "mask": torch.tensor([[1, 0, 1, 1, 1], [0, 1, 0, 0, 0], [1, 1, 1, 0, 0]]) > 0}
    errors = errors_of(losses, batch, BatchLayout(), loss)
    assert choose_rule(errors, 1e-9)[0] == name


def test_a_loss_of_two_kinds_follows_no_rule() -> None:
    losses = torch.rand(3, 5, dtype=torch.float64)
    found = errors_of(
        losses, BATCH, BatchLayout(), lambda t, b: t.mean() + t[b["y"] != -100].mean()
    )
    assert choose_rule(found, 1e-9) == []


def test_the_declared_rule_wins_unless_another_fits_much_better() -> None:
    assert choose_rule({"a": 1e-6, "b": 1e-7}, 1e-3) == ["a", "b"]
    assert choose_rule({"a": 9e-4, "b": 1e-7, "c": 5e-1}, 1e-3) == ["b"]
    assert choose_rule({"a": 2e-3, "b": 9e-4}, 1e-3) == ["a", "b"]
    assert choose_rule({"a": 2e-3}, 1e-3) == []


@pytest.mark.parametrize(
    ("weight", "total"),
    [("samples", 3), ("labels", 10), ("mask", None), (lambda b: b["y"][:, 0].abs().sum(), 107)],
)
def test_a_declared_weight_weighs_a_batch(weight, total) -> None:
    layout = BatchLayout(labels="y", loss_weight=weight)
    found = declared_rule(layout).weigh(BATCH, 3)
    assert found.dtype == torch.float64
    assert found == (BATCH["mask"].sum() if total is None else total)


def test_a_weight_that_is_no_number_is_refused() -> None:
    rule = declared_rule(BatchLayout(loss_weight=lambda batch: batch["y"]))
    with pytest.raises(PlanError, match=r"shape \(3, 5\), but it has to return one number"):
        rule.weigh(BATCH, 3)
