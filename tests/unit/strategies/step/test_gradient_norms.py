"""Norms of gradients of which another rank counts its copy."""

import math

import pytest
import torch
from torch import nn

from lightning_par.mesh import build_mesh
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.step.gradient_norms import GradientNorms
from lightning_par.verification.absent_ranks import lone_world


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3.0])
def test_a_copy_that_another_rank_counts_adds_nothing(value: float, norm_type: float) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), value)
    layer.bias.grad = torch.tensor([3.0, 0.0])
    names = {name: name for name, _ in layer.named_parameters()}
    with lone_world(0, 2):
        mesh = build_mesh(ParallelSizes(tensor=2), "cpu")
        elsewhere = frozenset({id(layer.weight)})
        norms = GradientNorms(layer, mesh, names, elsewhere, torch.device("cpu"))
        found = norms.of_parameters(norm_type)
    assert {name: float(norm) for name, norm in found.items()} == {"weight": 0, "bias": 3}
