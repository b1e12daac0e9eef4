"""What a run is told at its start about a plan that fits."""

import warnings
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.checks import check_module
from tests.support.models.plain_language_model import token_pairs
from tests.support.models.structures import (
    Convolutions,
    images,
    LanguageModel,
    Planless,
    Residual,
)


def planless(net: nn.Module, samples: list[Any]) -> Planless:
    """A module without a plan, whose Trainer has not begun."""
    made = Planless(net)
    made.train_dataloader = lambda: DataLoader(samples, 8)  # type: ignore[method-assign]
    made.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return made


def on_images(net: nn.Module) -> Planless:
    return planless(net, images())


def test_tensor_ranks_that_all_compute_the_same_are_told_to_the_user() -> None:
    """Convolutions are not divided, so two tensor ranks would only cost twice as much."""
    convolutions = on_images(Convolutions(lambda size: nn.GroupNorm(2, size)))
    options, two = MeshOptions(), ParallelSizes(tensor=2)
    with pytest.warns(UserWarning, match="tensor_parallel_size=2 shards no layer of Planless"):
        resolved = check_module(convolutions, options, two)
    assert set(resolved.styles.values()) == {"replicated"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*shards no layer")
        check_module(planless(LanguageModel(), token_pairs()), options, two)
        check_module(convolutions, options, ParallelSizes(pipeline=2))


class Conditioned(nn.Module):
    """Images [B, 3, 16, 16] -> [B, 10]; each layer gets what a part before them computes, too."""

    def __init__(self, *, layers: int) -> None:
        super().__init__()
        self.stem = Residual(3, 16)
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(layers))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        condition = hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden + condition)
        return self.head(hidden.mean((2, 3)))


def test_stages_that_compute_most_of_a_model_twice_are_told_to_the_user() -> None:
    """Every stage needs what the part before the layers computes."""
    two = ParallelSizes(pipeline=2)
    with pytest.warns(
        UserWarning, match=r"=2 divides only a small part of Planless\. .*net\.stem hold"
    ):
        check_module(on_images(Conditioned(layers=2)), MeshOptions(), two)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*divides only a small part")
        check_module(on_images(Conditioned(layers=32)), MeshOptions(), two)
