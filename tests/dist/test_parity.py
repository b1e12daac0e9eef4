"""Every layout computes what one process computes."""

from typing import Any

import pytest

from tests.parity import assert_parity

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
    "pp2": (2, 1, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    "dp2": (2, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
    "tp2pp2": (4, 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2z0": (2, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0}),
    "dp2z2": (2, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 2}),
    "dp2z3": (2, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}),
    "tp2dp2": (4, 2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
    "pp2dp2z1": (4, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    "pp2dp2z3": (4, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "zero_stage": 3}),
    "2x2x2": (8, 2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str) -> None:
    world, replicas, options = LAYOUTS[layout]
    assert_parity("hybrid3d", options, world, replicas, batch_size=4 // replicas, ignored=True)
