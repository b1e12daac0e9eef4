"""Compiled blocks compute what one process computes."""

from typing import Any

import pytest
import torch

import lightning_par
from lightning_par.errors import ConfigurationError
from tests.support.exhaustive import some
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import assert_parity, quiet_trainer

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


@pytest.mark.parametrize("layout", some(LAYOUTS, {"pp2"}))  # of which halves are a part
def test_compiled_blocks_equal_one_process(layout: str) -> None:
    world, replicas, options = LAYOUTS[layout]
    options = {**options, "compile_blocks": {"backend": "aot_eager"}}
    blocks = 2 * options["pipeline_parallel_size"]
    assert_parity("hybrid3d", options, world, replicas, batch_size=4, module={"blocks": blocks})


class CompiledModel(ToyModule):
    """What it trains is compiled when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model)


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data"])
def test_module_that_is_compiled_already_is_refused_before_anything_starts(layout: str) -> None:
    size: dict[str, Any] = {f"{layout}_parallel_size": 2}
    strategy = lightning_par.Hybrid3DStrategy(**size)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"'model' was compiled.* compile_blocks=True"):
        trainer.fit(CompiledModel(), loader(ToyData(4), 2))
