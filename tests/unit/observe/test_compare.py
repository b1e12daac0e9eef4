"""Distances of tensors that are not finite at the same entries."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_par.observe.compare import EXACT, measure_values, tolerance_of

FLOAT32 = tolerance_of(torch.float32)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_entries_that_broke_in_both_runs_hide_no_other(broken: float, kind: torch.dtype) -> None:
    wanted = torch.tensor([broken, 1.0, -2.0, 0.5], dtype=kind)
    for factor, differs in ((1.0, False), (1 + 1e-5, False), (1.1, True), (0.0, True)):
        got = wanted.clone()
        got[1:] *= factor
        assert (FLOAT32.distance(got, wanted) > 0) is differs
        assert (FLOAT32.distance(wanted, got) > 0) is differs
        (found,) = measure_values("output", "x", [got], [wanted], FLOAT32)
        assert (found.excess > 1) is differs


def test_entries_that_broke_in_one_run_differ() -> None:
    wanted, got = torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([math.nan, math.nan, 2.0])
    (found,) = measure_values("output", "x", [got], [wanted], FLOAT32)
    assert found.excess == math.inf
    assert not FLOAT32.distance(torch.tensor([math.nan] * 2), torch.tensor([math.nan] * 2))


def test_where_all_has_to_be_finite_nan_differs_from_itself() -> None:
    broken = torch.tensor([math.nan, 1.0])
    assert EXACT.distance(broken, broken) == math.inf
    assert not replace(EXACT, finite=False).distance(broken, broken)
