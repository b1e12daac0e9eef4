"""An offloaded optimizer beside the other axes: sequences, experts, tensors and stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.distributed.offload.test_parity import (
    assert_as_one_process,
    BY_VALUE,
    CLIPPED,
    IGNORE,
    with_defaults,
)
from tests.distributed.offload.test_places import assert_same_numbers
from tests.support.models.mixture import layout, make
from tests.support.models.toy_gpt import TOKENS
from tests.support.module_parity import assert_model_parity
from tests.support.offload_runs import run_offloaded

AXES: dict[str, dict[str, int]] = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "cp2 tp2": {"context": 2, "tensor": 2},
    "cp2 pp2": {"context": 2, "pipeline": 2},
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "tp2 dp2": {"tensor": 2, "data": 2},
    "pp2 dp2": {"pipeline": 2, "data": 2},
    "cp2 dp2": {"context": 2, "data": 2},
}
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "half": {"offload_fraction": 0.5},
    "file": {"offload_optimizer": "nvme:"},
    "parameters": {"offload_parameters": True},
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({}, {"trainer": CLIPPED}),
    "by value": (IGNORE, {"trainer": BY_VALUE}),
    "groups": (IGNORE, {"module": {"optimizer": "groups"}}),
}
QUICK = {
    ("cp2", "memory", "groups"),
    ("cp2", "file", "by value"),
    ("cp2 tp2", "half", "clipped"),
    ("tp2", "half", "clipped"),
    ("tp2", "memory", "groups"),
    ("tp2", "file", "clipped"),
    ("pp2", "half", "groups"),
    ("pp2", "file", "by value"),
    ("tp2 dp2", "parameters", "clipped"),
}
CASES = [
    (axes, place, run)
    for axes in AXES
    for place in PLACES
    for run in RUNS
    if place != "parameters" or AXES[axes].get("data", 1) > 1
]


def options_of(axes: str, place: str, folder: Path) -> dict[str, Any]:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1, **AXES[axes]}
    offload = dict(PLACES[place])
    if place == "file":
        offload["offload_optimizer"] = f"nvme:{folder}"
    stage = 3 if place == "parameters" else 1
    named = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    return {**named, "zero_stage": stage, "offload_options": offload}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=", ".join(c), marks=[] if c in QUICK else [pytest.mark.exhaustive])
        for c in CASES
    ],
)
def test_offloaded_on_every_axis_equals_one_process(
    case: tuple[str, str, str], tmp_path: Path
) -> None:
    axes, place, name = case
    judged, run = RUNS[name][0], with_defaults(RUNS[name][1])
    options = {**options_of(axes, place, tmp_path), **judged}
    world = torch.Size(AXES[axes].values()).numel()
    replicas = options["data_parallel_size"]
    results = run_offloaded("hybrid3d", options, world, {**run, "batch_size": 4 // replicas})
    if place == "half":
        assert_same_numbers(results, run, replicas)
    else:
        assert_as_one_process(results, run, replicas)
    # float64: a slot, a master and two moments of 8 bytes.
    sizes = [result["host_bytes"] / result["parameters"] for result in results]
    if place == "half":
        # Half of the whole model; what every rank has whole may be in the other half.
        assert all(12 <= size <= 26 for size in sizes), sizes
    else:
        assert set(sizes) == {24 if place == "parameters" else 32}
    whole = sum(w.numel() for w in results[0]["weights"].values())
    if axes != "cp2":
        assert all(result["parameters"] < 0.75 * whole for result in results)


class Halves(Callback):
    """Asserts, on a rank, that every block sees half of the tokens of a sample; in the first step
    they are looked at whole, too.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for block in pl_module.model.blocks:
            block.register_forward_pre_hook(lambda _, args: self.seen.add(args[0].shape[1]))

    def on_train_batch_end(self, _: Any, __: Any, ___: Any, ____: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.seen.clear()

    def on_train_end(self, *_: Any) -> None:
        assert self.seen == {TOKENS // 2}


def halves() -> list[Callback]:
    return [Halves()]


def test_sequences_are_divided_while_the_optimizer_is_on_the_host(tmp_path: Path) -> None:
    run = with_defaults({"trainer": CLIPPED})
    options = options_of("cp2", "memory", tmp_path)
    assert_as_one_process(run_offloaded("hybrid3d", options, 2, run, callbacks=halves), run, 1)


EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep2 zero1": (layout(dp=2, ep=2), {}),
    "ep2 zero3": (layout(dp=2, ep=2, zero=3), {"balance": "bias", "num_shared_experts": 1}),
    "ep2 zero0": (layout(dp=2, ep=2, zero=0), {}),
    "ep2 zero2": (layout(dp=2, ep=2, zero=2), {"balance": "bias"}),
    "ep2 dp2": (layout(dp=4, ep=2), {}),
    "ep2 tp2": (layout(tp=2, dp=2, ep=2), {}),
    "ep2 pp2": (layout(pp=2, dp=2, ep=2, zero=2), {}),
    "ep2 cp2": (layout(ep=2, context_parallel_size=2), {}),
    "dp2": (layout(dp=2), {}),
    "tp2": (layout(tp=2), {}),
}
OFTEN = ("ep2 zero1", "ep2 zero3", "ep2 cp2")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.exhaustive) for n in EXPERTS]
)
@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.5, marks=pytest.mark.exhaustive)])
def test_divided_experts_with_an_offloaded_optimizer_equal_one_process(
    name: str, fraction: float
) -> None:
    options, model = EXPERTS[name]
    cut = options["pipeline_parallel_size"] > 1
    offload = {"offload_options": {"offload_fraction": fraction, "bucket_size_mb": 1e-3}}
    results = assert_model_parity(
        make,
        {**model, "adam": True, "ragged": not cut},
        {**options, **offload},
        batch_size=4,
        micro_batches=2 if cut else 1,
        trainer={"gradient_clip_val": 0.5},
        gradients=False,
    )
    divided = options["expert_parallel_size"]
    for result in results:
        gone = {grad is None for step in result["gradients"] for grad in step.values()}
        assert gone == ({True} if fraction == 1 else {True, False})
        held = {shape[0] for n, shape in result["shapes"].items() if "experts.up" in n}
        assert max(held) <= 4 // divided
