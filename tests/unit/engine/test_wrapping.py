"""Wrappers of a forward: their order and their signature."""

import inspect
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.activations.checkpointing import recompute, wait_on_host
from lightning_par.engine.pipeline.split_backward import defer_weight_gradients, WeightGradients
from lightning_par.engine.wrapping import Forward, wrap_forward, wrappers_of


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


def adding(number: float) -> Any:
    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) + number

        return forward

    return around


def test_a_later_wrapper_is_outside() -> None:
    module, x = Scale(), torch.ones(3)
    wrap_forward(module, adding(1), "first")
    wrap_forward(module, lambda inner: lambda *args: 10 * inner(*args), "second")
    assert wrappers_of(module) == ("second", "first")
    assert module(x).tolist() == [30.0] * 3


def test_a_wrapped_forward_shows_the_signature_of_the_module() -> None:
    module = Scale()
    wrap_forward(module, adding(1), "first")
    assert list(inspect.signature(module.forward).parameters) == ["x", "factor"]


def test_a_wrapper_around_a_compiled_forward_is_itself_compiled() -> None:
    """torch.compile leaves a reference to what it compiled; a copy of it would hide the wrapper."""
    module = Scale()
    wrap_forward(module, lambda inner: torch.compile(inner, backend="eager"), "compile")
    wrap_forward(module, adding(1), "outside")
    wrap_forward(module, lambda inner: torch.compile(inner, backend="eager"), "compile again")
    assert wrappers_of(module) == ("compile again", "outside", "compile")
    assert module(torch.ones(3)).tolist() == [3.0] * 3


def test_the_wrappers_of_a_block_can_be_listed_in_their_order() -> None:
    block = nn.Linear(3, 5)
    defer_weight_gradients(block, WeightGradients())
    recompute(block, "full")
    wait_on_host(block)
    assert wrappers_of(block) == ("saved_on_host", "recompute_full", "deferred_weight_gradients")
    assert block(torch.ones(2, 3)).shape == (2, 5)
