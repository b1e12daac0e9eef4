"""Every pipeline schedule computes what one process computes, at every ZeRO stage."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.engine.pipeline.split_backward import Deferred
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import assert_parity, quiet_trainer
from tests.support.ranks.api import ranks

BEYOND = sorted(set(SCHEDULES) - {"1f1b", "gpipe"})
V_SHAPED = ("dualpipev", "zbv")
SGD = {"optimizer": "sgd"}
CLIP = {"gradient_clip_val": 0.05}


def check(
    schedule: str,
    ranks: int,
    microbatches: int,
    *,
    tp: int = 1,
    dp: int = 1,
    zero: int = 1,
    **run: Any,
) -> None:
    """Tied head, unequal blocks, uneven labels; a batch of 8 and one that is smaller."""
    options = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": ranks,
        "data_parallel_size": dp,
        "num_microbatches": microbatches,
        "schedule": schedule,
        "zero_stage": zero,
    }
    blocks = 8 if ranks == 4 else 5
    module = {**SGD, "blocks": blocks, **run.pop("module", {})}
    sizes = {"batch_size": 8 * dp, "size": 19 * dp, "trainer": CLIP, **run}
    world = tp * ranks * dp
    results = assert_parity("hybrid3d", options, world, dp, ignored=True, module=module, **sizes)
    held = {
        frozenset(int(n.split(".")[2]) for n in r["shapes"] if ".blocks." in n) for r in results
    }
    assert sum(map(len, held)) == blocks
    runs = SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1
    for blocks in held:  # contiguous for every stage of a rank, unless two stages meet
        gaps = sum(b + 1 not in blocks for b in blocks)
        assert gaps == runs or (schedule in V_SHAPED and gaps == 1)


@pytest.mark.parametrize("schedule", BEYOND)
def test_schedule_equals_one_process(schedule: str) -> None:
    """With fewer micro-batches than fill two stages twice; with 4, replicas have each, below."""
    check(schedule, 2, 3, module={"recompute": True})


@pytest.mark.parametrize("schedule", BEYOND)
def test_four_stages_and_recomputation_equal_one_process(schedule: str) -> None:
    check(schedule, 4, 8, module={"recompute": True})


# Together with the accumulated batches below: every stage twice or more, every schedule with two
# stages but zb-h2. `test_every_zero_stage` has all pairs.
@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        ("interleaved", 1),
        ("zb-h1", 0),
        ("zb-h2", 2),
        ("zbv", 3),
        ("zbv", 0),
        ("interleaved-zb", 2),
        ("dualpipev", 3),
    ],
)
def test_replicas_equal_one_process(schedule: str, zero: int) -> None:
    check(schedule, 2, 4, dp=2, zero=zero, module={"recompute": zero == 3})


MIXED = """
0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0I3 0W2 0W3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3  # splits no backward
"""


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_one_rank_may_split_backwards_and_another_not(zero: int, tmp_path: Path) -> None:
    """With replicas: FSDP reduces in the backwards of the one, and at the end for the other."""
    path = tmp_path / "mixed.txt"
    path.write_text(MIXED)
    check(str(path), 2, 4, dp=2, zero=zero)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_tensor_parallelism_equals_one_process(schedule: str) -> None:
    check(schedule, 2, 4, tp=2)


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        ("zbv", 1),
        ("zb-h1", 2),
        ("interleaved", 3),
        ("interleaved-zb", 0),
        ("dualpipev", 2),
    ],
)
def test_accumulated_batches_equal_one_process(schedule: str, zero: int) -> None:
    trainer = {**CLIP, "accumulate_grad_batches": 2}
    check(schedule, 2, 4, dp=2, zero=zero, size=70, trainer=trainer)


def test_lower_precision_is_as_close_as_its_rounding() -> None:
    """The bounds of test_parity.py; the linear maps see autocast's dtype."""
    rounding = {"atol": 2e-2, "rtol": 2e-3}
    check("zbv", 2, 4, **rounding, trainer={**CLIP, "precision": "bf16-mixed"})


@ranks(2)
@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("zb-h1", 1), ("zbv", 3), ("interleaved-zb", 2), ("1f1b", 1)],
)
def test_gradients_of_weights_wait_where_the_schedule_says(
    rank: int, world: int, schedule: str, zero: int
) -> None:
    """Of a user's model, through the Trainer: every linear map of a block, every micro-batch."""
    waited: list[int] = []
    compute = Deferred.accumulate

    def watch(deferred: Deferred) -> None:
        waited.append(deferred.weight.numel())
        compute(deferred)

    options = {"pipeline_parallel_size": 2, "schedule": schedule, "zero_stage": zero}
    module = ToyModule(blocks=4, optimizer="sgd")
    strategy = Hybrid3DStrategy(
        **options, tensor_parallel_size=1, num_microbatches=4, gather_after_run=False
    )
    with patch.object(Deferred, "accumulate", watch):
        quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(module, loader(ToyData(4), 4))
    linear = sum(isinstance(m, nn.Linear) for m in module.modules())
    assert len(waited) == (0 if schedule == "1f1b" else 4 * linear)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ranks", "count"), [*product((2, 4), (1, 3, 4, 8)), (2, 5), (4, 7)])
@pytest.mark.parametrize("schedule", BEYOND)
def test_every_number_of_micro_batches(
    schedule: str, ranks: int, count: int, recompute: bool
) -> None:
    check(schedule, ranks, count, module={"recompute": recompute})


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", BEYOND)
def test_every_zero_stage(schedule: str, zero: int, recompute: bool) -> None:
    check(schedule, 2, 4, dp=2, zero=zero, module={"recompute": recompute})
