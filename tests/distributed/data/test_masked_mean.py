"""A mean over a mask without any entry is 0/0: it weighs nothing, in value and in gradient."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.engine.data.zero_weight_loss import ZeroWeightBackward
from tests.support.parity import assert_parity

ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dp2 zero0": ({**ONE, "zero_stage": 0}, 2, 2),
    "dp2 zero1": ({**ONE, "zero_stage": 1}, 2, 2),
    "dp2 zero3": ({**ONE, "zero_stage": 3}, 2, 2),
    "pp2": ({**ONE, "pipeline_parallel_size": 2, "num_microbatches": 2}, 2, 1),
    "pp2 dp2 zero3": ({**ONE, "pipeline_parallel_size": 2, "zero_stage": 3}, 4, 2),
    "pp2 dp2 zero bubble": ({**ONE, "pipeline_parallel_size": 2, "schedule": "zb-h1"}, 4, 2),
}


@pytest.mark.parametrize(
    ("layout", "batch_size"), [*((layout, 2) for layout in LAYOUTS), ("pp2 dp2 zero bubble", 4)]
)
def test_replica_or_micro_batch_without_a_valid_label_leaves_gradients_right(
    layout: str, batch_size: int
) -> None:
    """Sample 5 has no valid label; in batches of 2 it is a replica or a micro-batch of its own, in
    batches of 4 a micro-batch of a replica.
    """
    options, world, replicas = LAYOUTS[layout]
    assert_parity(
        "hybrid3d",
        options,
        world,
        replicas,
        batch_size=batch_size,
        ignored=True,
        module={"masked": True, "blocks": 2},
    )


def test_zero_weight_zeroes_only_the_backwards_inside_it_and_leaves_no_hook() -> None:
    unit = nn.Linear(3, 2)
    hooks = ZeroWeightBackward([unit])
    with hooks.prepared():
        first, second = unit(torch.ones(5, 3)).sum(), unit(torch.ones(7, 3)).sum()
        with hooks.zero_gradients():
            (first / 0).backward()
        assert unit.weight.grad is not None
        assert unit.weight.grad.eq(0).all()
        second.backward()
    assert unit.weight.grad.eq(7).all()
    assert not unit._forward_pre_hooks
    assert not unit.weight._backward_hooks
