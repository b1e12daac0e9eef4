"""Random states: what a fork restores, and what a seed reaches."""

import random

import numpy as np
import torch

from lightning_par.engine.rng import fork_all_rng, fork_torch_rng, seed_all_generators

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_one_seed_reaches_every_generator() -> None:
    with fork_all_rng(CPU):
        seed_all_generators(2**62 + 3, CPU)
        first = draws()
        seed_all_generators(2**62 + 3, CPU)
        assert draws() == first
        assert draws() != first


def test_a_fork_of_all_restores_every_generator() -> None:
    with fork_all_rng(CPU):
        expected = draws()
    with fork_all_rng(CPU):
        seed_all_generators(7, CPU)
        draws()
    with fork_all_rng(CPU):
        assert draws() == expected


def test_a_fork_of_torch_leaves_the_other_generators_alone() -> None:
    with fork_all_rng(CPU):
        expected = draws()
    with fork_all_rng(CPU):
        with fork_torch_rng(CPU):
            first = draws()
        second = draws()
    assert first == expected
    assert second[2] == expected[2]
    assert second[:2] != expected[:2]
