"""Forecasts of mixed precision against rehearsals, which run every operation of a rank."""

from functools import partial
from typing import Any

import pytest

from lightning_par.models import GPTConfig
from lightning_par.observe.live_bytes import ACTIVATIONS
from lightning_par.planner.memory import block_activations
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.rehearse import Rehearsal, rehearse_apart
from tests.support.models.rehearsed import build

SIZES: dict[str, Any] = {"model_dim": 256, "num_heads": 8, "num_kv_heads": 8, "dropout": 0.0}


def make(
    axis: str, overrides: dict[str, Any], precision: str, observer: Any, environment: Any
) -> Any:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, f"{axis}_parallel_size": 2}
    given = {"plugins": [environment], "callbacks": [observer], "precision": precision}
    return build(sizes, devices=2, overrides=overrides, **given)


def run(axis: str, layers: int, precision: str) -> Rehearsal:
    made = partial(make, axis, {**SIZES, "num_layers": layers}, precision)
    return rehearse_apart(made, num_nodes=1, devices=2, rank=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activations_and_bytes_are_those_of_a_rehearsal(precision: str) -> None:
    """Under autocast what enters blocks, norms and divided layers is in float32 all the same."""
    profile = load_profile("h100")
    code = implementation(precision, profile)
    shape = read_shape(GPTConfig(num_layers=8, **SIZES), 48)
    planner = Planner(shape=shape, device=profile, code=code)

    few, many = (run("tensor", layers, precision) for layers in (4, 8))
    layout = Layout(sizes=ParallelSizes(tensor=2), micro_batch=6)
    kept = (many.memory[ACTIVATIONS] - few.memory[ACTIVATIONS]) / 4
    found = block_activations(shape, layout, code)
    if code.autocast:  # the weights as products take them
        found += 2 * shape.block_weights(2)
    assert found == pytest.approx(kept, rel=0.15)
    sent = sum(entry.sent for entry in many.volume if entry.axis == "tp")
    # Besides, what enters and leaves the blocks is cut and joined.
    assert planner.predict(layout).traffic["tp"] == pytest.approx(sent, rel=0.1)

    staged = run("pipeline", 8, precision)
    layout = Layout(sizes=ParallelSizes(pipeline=2), micro_batch=3, microbatches=2)
    sent = sum(entry.sent for entry in staged.volume if entry.axis == "pp activations")
    # There and, of the gradients, back.
    assert planner.predict(layout).traffic["pp"] == pytest.approx(2 * sent, rel=0.01)
