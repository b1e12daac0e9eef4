"""A tensor style is one row of one table, and at most one function."""

from dataclasses import fields
from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lightning_par.engine.memory.placement import find_placements
from lightning_par.engine.tensor.parameters import tensor_placements
from lightning_par.engine.tensor.styles import STYLE_FUNCTIONS
from lightning_par.engine.tensor_tree import on_first_tensor
from lightning_par.errors import PlanError
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.plan.tensor_styles import StyleSpec, TENSOR_STYLES, TensorStyle
from lightning_par.sizes import ParallelSizes

TP2 = ParallelSizes(tensor=2)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5))


def test_the_table_has_every_name_and_functions_only_for_these() -> None:
    assert tuple(TENSOR_STYLES) == get_args(TensorStyle) == tuple(sorted(TENSOR_STYLES))
    assert set(STYLE_FUNCTIONS) < set(TENSOR_STYLES)


@pytest.mark.parametrize("field", [f.name for f in fields(StyleSpec)])
def test_every_column_distinguishes_styles(field: str) -> None:
    assert len({getattr(spec, field) for spec in TENSOR_STYLES.values()}) > 1


def test_a_checked_weight_is_sharded_in_one_of_its_dims() -> None:
    for style, spec in TENSOR_STYLES.items():
        if spec.weight_ndim is not None:
            assert spec.weight_dim is not None, style
            assert spec.weight_dim < spec.weight_ndim, style
        assert not spec.uneven or spec.weight_dim == 0, style


def test_a_new_style_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = StyleSpec(meaning="the weight sharded, the bias not", weight_dim=0, weight_ndim=2)
    monkeypatch.setitem(TENSOR_STYLES, "mine", row)  # type: ignore[arg-type]
    plan = ParallelPlan(tensor={"0": "mine", "1": "replicated"})  # type: ignore[dict-item]
    resolved = check_plan(two_layers(), plan, TP2)
    placed = tensor_placements(two_layers(), resolved)
    assert placed["0.weight"] == Shard(0)
    assert {placed[n] for n in ("0.bias", "1.weight", "1.bias")} == {Replicate()}
    found = {p.name: p.reason for p in find_placements(two_layers(), resolved, TP2)}
    assert found["0.weight"] == ""
    assert found["1.weight"] == "replicated: every rank computes it alike"
    with pytest.raises(PlanError, match=r"0\.weight has size 6 in dim 0, not divisible by 4"):
        check_plan(two_layers(), plan, ParallelSizes(tensor=4))


def test_an_unknown_style_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PlanError, match=r"'colwize', .* not exist; did you mean 'colwise'\?"):
        ParallelPlan(tensor={"0": "colwize"})  # type: ignore[dict-item]


class Cache:
    """What a module updates in place has to stay the same object."""


def test_the_first_tensor_is_replaced_and_nothing_else() -> None:
    one, two, cache = torch.ones(2), torch.ones(3), Cache()
    args, kwargs = on_first_tensor(lambda x: 2 * x, ((None, 3), {"x": one, "y": two, "c": cache}))
    assert args == (None, 3)
    assert torch.equal(kwargs["x"], 2 * one)
    assert kwargs["y"] is two
    assert kwargs["c"] is cache
    with pytest.raises(PlanError, match="without a tensor"):
        on_first_tensor(lambda x: x, ((), {"a": 1}))
