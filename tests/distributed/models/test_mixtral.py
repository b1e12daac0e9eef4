"""Mixtral computes on every layout what one process computes: weights, balance, who is dropped."""

from typing import Any

import pytest
import torch

from lightning_par.engine.pipeline.schedules import SCHEDULES
from tests.support.exhaustive import some
from tests.support.models.mixture import DIM, EXPERTS, FF, layout, LENGTH, make
from tests.support.module_parity import assert_model_parity, train_model_rank
from tests.support.ranks.api import run_ranks

AUXILIARY: dict[str, Any] = {}
BIAS = {"balance": "bias", "num_shared_experts": 1}
SWITCH = {"routing": "switch", "experts_per_token": 1, "capacity_factor": 1.0}
CHOICE = {"routing": "expert_choice", "balance": "none"}
SKEWED = {"balance": "bias", "experts_per_token": 1, "skewed": True}
ALL = {"experts_per_token": EXPERTS}
TOKENS = 2 * LENGTH
"""Of a rank in a step, where two replicas share four samples."""

LARGE = {"pp2", "dp2", "cp2", "cp2 dp2", "ep2 zero0", "ep2 dp2 zero1", "ep2 dp2 zero2"}
LARGE |= {"ep2 one expert has all, padded", "ep2 expert choice, padded"}
LARGE |= {"ep2 cp2", "ep2 tp2 padded", "ep2 pp2 padded"}
"""What fails here fails, too, where experts are divided, with other stages, or with more axes."""


def check(model: dict[str, Any], options: dict[str, Any], micro: int = 1) -> None:
    cut = options["pipeline_parallel_size"] > 1
    layers = 3 if cut else 2  # stages have unequal parts
    results = assert_model_parity(
        make,
        {"num_layers": layers, **model, "ragged": not cut},
        options,
        batch_size=4,
        micro_batches=2 if cut else 1,
        trainer={"gradient_clip_val": 0.5},
    )
    tp, ep = options["tensor_parallel_size"], options["expert_parallel_size"]
    left = 1
    if options["zero_stage"]:
        left = options["data_parallel_size"] // options.get("data_parallel_replicate_size", 1)
        if left > 1 and ep > 1:  # among the context ranks too, see `ParallelSizes.expert_shape`
            left = left * options.get("context_parallel_size", 1) // ep
    for result in results:
        held = {n: s for n, s in result["shapes"].items() if "experts.up" in n}
        assert len(held) == layers or cut
        for shape in held.values():
            assert shape[0] * shape[1] * shape[2] == EXPERTS * FF * DIM // (ep * tp * left)
            assert shape[1] == FF // tp
            assert ep == 1 or shape[0] == EXPERTS // ep


WHOLE = {
    "tp2": (layout(tp=2), BIAS),
    "tp2 whole sequences": (layout(tp=2, sequence_parallel=False), AUXILIARY),
    "pp2": (layout(pp=2), AUXILIARY),
    "pp2 zbv": (layout(pp=2, schedule="zbv"), {"num_layers": 5}),
    "dp2": (layout(dp=2), AUXILIARY),
    "dp2 zero3": (layout(dp=2, zero=3), BIAS),
    "cp2": (layout(context_parallel_size=2), AUXILIARY),
    "cp2 dp2": (layout(dp=2, context_parallel_size=2), BIAS),
    "tp2 switch": (layout(tp=2), SWITCH),
}


@pytest.mark.parametrize("name", some(WHOLE, LARGE))
def test_undivided_experts_equal_one_process(name: str) -> None:
    options, model = WHOLE[name]
    check(model, options)


DIVIDED = {
    "ep2": (layout(dp=2, ep=2), AUXILIARY),
    "ep2 zero0": (layout(dp=2, ep=2, zero=0), BIAS),
    "ep2 zero3": (layout(dp=2, ep=2, zero=3), BIAS),
    "ep2 switch": (layout(dp=2, ep=2), SWITCH),
    "ep2 expert choice": (layout(dp=2, ep=2), CHOICE),
    "ep2 one expert has all": (layout(dp=2, ep=2), SKEWED),
    "ep2 k=E": (layout(dp=2, ep=2), ALL),
    "ep4": (layout(dp=4, ep=4), BIAS),
    "ep2 tp2": (layout(tp=2, dp=2, ep=2), BIAS),
    "ep2 pp2": (layout(pp=2, dp=2, ep=2, zero=2), AUXILIARY),
    "ep2 dp2 zero0": (layout(dp=4, ep=2, zero=0), BIAS),
    "ep2 dp2 zero1": (layout(dp=4, ep=2, zero=1), SWITCH),
    "ep2 dp2 zero2": (layout(dp=4, ep=2, zero=2), AUXILIARY),
    "ep2 cp2": (layout(ep=2, context_parallel_size=2), AUXILIARY),
    "ep2 cp2 dp2": (layout(dp=2, ep=2, zero=2, context_parallel_size=2), BIAS),
    "ep2 replicated": (layout(dp=4, ep=2, zero=3, data_parallel_replicate_size=2), AUXILIARY),
    "ep2 padded": (layout(dp=2, ep=2, zero=3, expert_max_rows=2 * TOKENS), BIAS),
    "ep2 switch padded": (layout(dp=2, ep=2, expert_max_rows=2 * 2 * 3), SWITCH),
    "ep2 one expert has all, padded": (layout(dp=2, ep=2, expert_max_rows=TOKENS), SKEWED),
    "ep2 expert choice, padded": (layout(dp=2, ep=2, expert_max_rows=2 * 2 * 7), CHOICE),
    "ep2 tp2 padded": (layout(tp=2, dp=2, ep=2, expert_max_rows=2 * TOKENS), AUXILIARY),
    "ep2 pp2 padded": (layout(pp=2, dp=2, ep=2, zero=2, expert_max_rows=2 * TOKENS), BIAS),
}


@pytest.mark.parametrize("name", some(DIVIDED, LARGE))
def test_divided_experts_equal_one_process(name: str) -> None:
    options, model = DIVIDED[name]
    check(model, options)


def test_noise_is_the_same_on_every_rank_that_holds_a_part_of_the_model() -> None:
    model = {"routing": "noisy_top_k"}
    run = {"batch_size": 4}
    sharded = run_ranks(train_model_rank, 2, make, model, layout(tp=2), run, timeout=120)
    cut = layout(pp=2, num_microbatches=1)
    staged = run_ranks(train_model_rank, 2, make, model, cut, run, timeout=120)
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(sharded[0]["losses"], staged[0]["losses"], **close)
    torch.testing.assert_close(sharded[0]["weights"], staged[0]["weights"], **close)
    gradient = sharded[0]["gradients"][0]["model.blocks.2.moe.router.noise.weight"]
    assert gradient.abs().max() > 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [AUXILIARY, BIAS, SWITCH], ids=["auxiliary", "bias", "switch"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, {"dp": 4}, {"dp": 4, "ep": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}],
    ids=["ep2", "ep2 dp2", "ep4", "ep2 tp2", "ep2 pp2"],
)
def test_every_zero_stage_and_balance(
    axes: dict[str, int], zero: int, model: dict[str, Any]
) -> None:
    check(model, layout(**{"ep": 2, **axes}, zero=zero))


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dp", "cp", "ep"), [(1, 4, 2), (1, 4, 4), (2, 2, 4)], ids=["cp4 ep2", "cp4 ep4", "dp2 cp2 ep4"]
)
def test_experts_divided_among_context_ranks(dp: int, cp: int, ep: int, zero: int) -> None:
    check(BIAS, layout(dp=dp, ep=ep, zero=zero, context_parallel_size=cp))


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", [AUXILIARY, BIAS], ids=["auxiliary", "bias"])
def test_all_axes_together(zero: int, model: dict[str, Any]) -> None:
    check(model, layout(tp=2, pp=2, dp=2, ep=2, zero=zero))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"1f1b"}))
def test_every_schedule(schedule: str) -> None:
    check({"num_layers": 5}, layout(pp=2, dp=2, ep=2, schedule=schedule))
