"""The parts of the proof of the first step: batches, tolerances, copies, dropout, a step alone."""

from collections import namedtuple
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par import BatchLayout
from lightning_par.engine.rng import collect_random_states
from lightning_par.observe.compare import (
    Difference,
    first_beyond,
    measure_backwards,
    measure_states,
    tolerance_of,
)
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.report import StartValues, StepRecord
from lightning_par.strategies.data.joined_batch import CannotJoinError, join_batches
from lightning_par.strategies.proof.one_process import GivenStep, run_alone
from lightning_par.strategies.proof.skeleton import Skeleton
from tests.support.parity import quiet_trainer

CPU = torch.device("cpu")
DOUBLE = tolerance_of(torch.float64)
Pair = namedtuple("Pair", "x y")


def parts(*batches: Any) -> Any:
    return join_batches(batches)


def test_samples_are_joined_and_what_is_no_sample_is_taken_once() -> None:
    table, first, other = torch.ones(5, 2), torch.zeros(3, 4), torch.ones(3, 4)
    one = {"table": table, "pair": Pair(first, first[:, 0]), "names": ["a", "b", "c"], "k": 7}
    two = {"table": table, "pair": Pair(other, other[:, 0]), "names": ["d", "e", "f"], "k": 7}
    joined = parts(one, two)
    assert joined["table"].shape == (5, 2)
    assert joined["pair"].x.shape == (6, 4)
    assert joined["names"] == ["a", "d", "b", "e", "c", "f"]  # in turns
    assert joined["k"] == 7


def test_other_tables_cannot_be_joined() -> None:
    with pytest.raises(CannotJoinError, match="'table' has no batch dim"):
        parts(
            {"table": torch.ones(5), "x": torch.ones(3, 2), "y": torch.ones(3)},
            {"table": torch.zeros(5), "x": torch.ones(3, 2), "y": torch.ones(3)},
        )


def test_unequal_lengths_are_padded_where_asked() -> None:
    short, long = (torch.ones(2, 3), torch.ones(2, 3).long()), (torch.ones(2, 5), torch.ones(2, 5))
    long = (long[0], long[1].long())
    with pytest.raises(CannotJoinError, match="different shapes"):
        parts(short, long)
    x, y = join_batches([short, long], BatchLayout(sequence_dims={"1": 1}, labels="1"))
    assert x[0].tolist() == [1, 1, 1, 0, 0]
    assert y[0].tolist() == [1, 1, 1, -100, -100]


def compare_backwards(*arguments: Any) -> Difference | None:
    return first_beyond(measure_backwards(*arguments))


def compare_states(*arguments: Any) -> Difference | None:
    return first_beyond(measure_states(*arguments))


def record(loss: float, **gradients: Tensor) -> StepRecord:
    return StepRecord(losses=[loss], gradients=[gradients])


def test_gradients_next_to_nothing_may_differ() -> None:
    one = record(1.0, big=torch.ones(4).double(), none=torch.tensor([1e-12]).double())
    mesh = record(1.0, big=torch.ones(4).double(), none=torch.tensor([-1e-12]).double())
    assert compare_backwards(mesh, one, DOUBLE) is None


def test_a_factor_is_named() -> None:
    one = record(1.0, weight=torch.ones(4).double())
    mesh = record(1.0, weight=2 * torch.ones(4).double())
    found = compare_backwards(mesh, one, DOUBLE)
    assert found is not None
    assert found.factor == pytest.approx(2)
    assert found.name == "weight"


def test_a_missing_gradient_differs() -> None:
    one = record(1.0, weight=torch.ones(4).double())
    assert compare_backwards(record(1.0), one, DOUBLE) is not None


def test_a_loss_that_is_not_a_number_differs_from_one_that_is() -> None:
    nan = float("nan")
    assert compare_backwards(record(nan), record(1.0), DOUBLE) is not None
    assert compare_backwards(record(nan), record(nan), DOUBLE) is None


def test_updates_are_compared_by_their_size() -> None:
    before = {"w": torch.full((4,), 1e3).double()}
    one = {"w": before["w"] - 1e-3}
    assert compare_states(before, {"w": before["w"] - 1e-3 - 1e-13}, one, DOUBLE) is None
    found = compare_states(before, {"w": before["w"] - 2e-3}, one, DOUBLE)
    assert found is not None
    assert found.factor == pytest.approx(2)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.net[1].weight = self.net[0].weight
        self.net[0].weight.no_decay = True  # type: ignore[union-attr]
        self.net[0].weight.register_hook(lambda g: 0.5 * g)
        self.seen: list[float] = []
        self.net[0].register_forward_hook(
            lambda m, a, out: self.seen.append(float(out.detach().sum()))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_copy_keeps_ties_attributes_and_hooks_and_leaves_the_original_alone() -> None:
    module = Module()
    skeleton = Skeleton(module, [])
    assert {p.device.type for p in skeleton.module.parameters()} == {"meta"}
    values = dict(module.named_parameters())
    copied, _ = skeleton.fill(values, quiet_trainer())
    assert copied.net[0].weight is copied.net[1].weight
    assert copied.net[0].weight.no_decay
    copied.training_step(torch.ones(2, 3), 0).backward()
    module.training_step(torch.ones(2, 3), 0).backward()
    assert len(copied.seen) == len(module.seen) == 1
    torch.testing.assert_close(copied.net[0].weight.grad, module.net[0].weight.grad)


def test_a_step_alone_is_that_of_a_trainer() -> None:
    module, batch = Module(), torch.ones(2, 3)
    user = quiet_trainer(max_steps=3)
    skeleton = Skeleton(module, [])
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    start = StartValues(tensors=values, global_step=0, epoch=0, continues=False)
    given = GivenStep(
        start=start, batches=[batch], arguments=[[0]], random_states=[collect_random_states(CPU)]
    )
    got = run_alone(skeleton, given, user, {}, CPU)
    assert got.error is None
    assert not got.draws
    wanted = quiet_trainer(max_steps=1)
    wanted.fit(module, DataLoader([batch], batch_size=None))
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(got.state[name], parameter.detach(), rtol=0, atol=0)


def test_without_dropout_nothing_is_drawn() -> None:
    x, attention = torch.ones(2, 1, 4, 8), nn.MultiheadAttention(8, 2, dropout=0.5)
    before = torch.get_rng_state()
    with WithoutDropout() as mode:
        torch.testing.assert_close(F.feature_alpha_dropout(x, 0.5, True), x)
        torch.testing.assert_close(torch.dropout(x, 0.5, True), x)
        F.scaled_dot_product_attention(x, x, x, None, 0.5)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        F.scaled_dot_product_attention(x, x, x, None, 0.5, True)
        assert x.new_empty(3).bernoulli_(0.9).tolist() == [1.0, 1.0, 1.0]
        kept = torch.bernoulli(torch.full((3, 1), 0.9)), torch.full((3, 1), 0.2).bernoulli()
        assert [each.tolist() for each in kept] == [[[1.0]] * 3, [[0.0]] * 3]
        slopes = F.rrelu(-x, training=True)
        for needs_weights in (False, True):
            mixed, _ = attention(x[0], x[0], x[0], need_weights=needs_weights)
    assert mode.calls == 11
    torch.testing.assert_close(slopes, F.rrelu(-x))
    torch.testing.assert_close(mixed, attention.eval()(x[0], x[0], x[0])[0])
    assert torch.equal(before, torch.get_rng_state())
    with WithoutDropout() as mode:  # what chooses labels is no dropout
        torch.bernoulli(torch.full((3, 4), 0.5)), torch.bernoulli(torch.full((3,), 0.5))
    assert mode.calls == 0
