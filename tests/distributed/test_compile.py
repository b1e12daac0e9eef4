"""Compiled blocks compute what one process computes."""

from typing import Any

import pytest

from tests.support.parity import assert_parity

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
    "pp2": (2, 1, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    "pp2 in halves": (
        2,
        1,
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "schedule": "zbv"},
    ),
    "dp2": (2, 2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_equal_one_process(layout: str) -> None:
    world, replicas, options = LAYOUTS[layout]
    options = {**options, "compile_blocks": {"backend": "aot_eager"}}
    assert_parity("hybrid3d", options, world, replicas, batch_size=4, module={"blocks": 4})
