"""Laws of draws for a whole batch: parts get the rows that the whole would have got."""

import re
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.step.random_draws import Rows, Tokens, WholeDraws

CPU = torch.device("cpu")
B, T = 6, 20

DRAWS: dict[str, Any] = {
    "randn": lambda x: torch.randn(len(x), T),
    "rand of a size": lambda x: torch.rand(size=(len(x),), dtype=torch.float64),
    "randint": lambda x: torch.randint(3, 9, (len(x), 2)),
    "like": lambda x: torch.randn_like(x),
    "of another order in memory": lambda x: torch.rand_like(x.T.contiguous().T),
    "in place": lambda x: torch.empty(T, len(x)).T.uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 3),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "dropout": lambda x: F.dropout(x, 0.4),
    "flattened": lambda x: torch.randn(x.numel()).view(x.shape),
    "batch dim last": lambda x: torch.randn(T, len(x)).T,
    "two draws": lambda x: torch.rand(len(x), 1) + torch.rand(()),
}


def prepared(draw: Any, x: Tensor) -> WholeDraws:
    """A mode that has seen the draw for 4 samples and for 2 of them."""
    mode = WholeDraws(CPU)
    for size in (4, 2):
        with mode.forward(Rows(0, size, 4)):
            draw(x[:size])
        mode.learn()
    mode.settle()
    return mode


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    "parts",
    [
        [Rows(0, 2, B), Rows(2, 4, B)],
        [Rows(0, 3, B, 2), Rows(1, 3, B, 2)],
        [Rows(0, B, B)],
    ],
    ids=["micro-batches", "replicas", "whole"],
)
def test_parts_draw_what_the_whole_draws(name: str, parts: list[Rows]) -> None:
    draw, x = DRAWS[name], torch.randn(B, T, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    whole, after = draw(x), torch.get_rng_state()
    mode = prepared(draw, x)
    for rows in parts:
        own = rows.start + rows.stride * torch.arange(rows.length)
        torch.manual_seed(0)
        with mode.forward(rows):
            found = draw(x[own])
        torch.testing.assert_close(found, whole[own], rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), after)


def test_what_has_no_batch_dim_is_drawn_alike() -> None:
    draw = lambda x: torch.rand(2)  # noqa: E731  # as many as the samples of a micro-batch
    mode = prepared(draw, torch.zeros(B, T))
    torch.manual_seed(0)
    whole = torch.rand(2)
    torch.manual_seed(0)
    with mode.forward(Rows(2, 2, B)):
        assert torch.equal(draw(torch.zeros(2)), whole)


def test_a_generator_begins_anew_for_every_micro_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(B, T, generator=torch.Generator().manual_seed(1))
    mode = WholeDraws(CPU)
    for index, start in enumerate((0, 3)):
        with mode.forward(Rows(start, 3, B), rewinds=index > 0):
            found = torch.randn(3, T, generator=generator)
        assert torch.equal(found, whole[start : start + 3])


def test_a_rank_draws_the_rows_of_its_tokens() -> None:
    torch.manual_seed(0)
    whole = torch.randn(B, 8, 5)
    mode = WholeDraws(CPU)
    for start in (0, 4):
        mode.tokens = Tokens(start, 4, 8)
        torch.manual_seed(0)
        with mode.forward(Rows(2, 3, B)):
            found = torch.randn_like(torch.zeros(3, 4, 5))
        assert torch.equal(found, whole[2:5, start : start + 4])


def test_a_block_that_is_recomputed_draws_the_same_rows() -> None:
    mode, x = prepared(F.dropout, torch.ones(B, T)), torch.ones(2, T, requires_grad=True)
    drawn = []

    def block(x: Tensor) -> Tensor:
        drawn.append(F.dropout(x).detach())
        return (x * drawn[-1]).sin()

    with mode.forward(Rows(4, 2, B)):
        out = checkpoint(block, x, use_reentrant=False).sum()
    with mode.replay(Rows(4, 2, B)):
        out.backward()
    assert len(drawn) == 2
    assert torch.equal(*drawn)


def test_dropout_alone_is_no_draw_and_evaluation_none_at_all() -> None:
    mode = WholeDraws(CPU)
    with mode.forward(Rows(0, 2, B)):
        nn.Dropout(0.5)(torch.ones(2, T))
        nn.Dropout(0.5).eval()(torch.ones(2, T))
    assert not mode.drew


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.randperm(len(x)), r"randperm\(2\) to shuffle"),
        (
            lambda x: torch.rand(len(x), len(x)),
            r"rand for .*\(4, 4\) with 4 samples, and .*\(2, 2\)",
        ),
        (lambda x: torch.poisson(x), "poisson for each sample"),
    ],
)
def test_what_cannot_be_shared_is_refused(draw: Any, message: str) -> None:
    mode = prepared(draw, torch.ones(B, T))
    assert re.search(message, mode.refusal.message)
    if "rand for" not in message:
        with pytest.raises(ConfigurationError, match=message), mode.forward(Rows(0, 2, B)):
            draw(torch.ones(2, T))
