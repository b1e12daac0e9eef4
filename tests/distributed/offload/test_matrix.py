"""Stages, ranks, clipping, accumulation and places of an offloaded optimizer, in every combination.

The default run takes combinations that hold every pair of values at least once.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.offload.test_parity import BY_VALUE, CLIPPED, IGNORE, with_defaults
from tests.distributed.offload.test_places import assert_same_numbers
from tests.support.offload_runs import run_offloaded

Case = tuple[str, ...]

STAGES = {f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)}
RANKS = {"1 rank": 1, "2 ranks": 2}
CLIPPING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "free": (IGNORE, {}),
    "by norm": ({}, CLIPPED),
    "by value": (IGNORE, BY_VALUE),
}
BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 batch": (1, {}),
    "2 batches": (2, {}),
    "2 batches added on the host": (2, {"accumulate_on": "host"}),
}
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "file": {"offload_optimizer": "nvme:"},
    "half": {"offload_fraction": 0.5},
    "parameters": {"offload_parameters": True},
}


def is_possible(case: Case) -> bool:
    stage, ranks, _, batches, place = case
    if place == "half" and "on the host" in batches:
        return False
    return place != "parameters" or (stage == "stage 3" and ranks == "2 ranks")


CASES = [
    *filter(is_possible, itertools.product(STAGES, RANKS, CLIPPING, BATCHES, PLACES)),
]


def pairs(case: Case) -> set[Any]:
    """Return the pairs of values in a combination, each with its places."""
    return set(itertools.combinations(enumerate(case), 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """Return some of the combinations that hold every pair of values of all of them."""
    chosen, left = [], set().union(*map(pairs, cases))
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


QUICK = covering(CASES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=", ".join(c), marks=[] if c in QUICK else [pytest.mark.exhaustive])
        for c in CASES
    ],
)
def test_combination_equals_one_process(case: Case, tmp_path: Path) -> None:
    """Several buckets, an odd last batch, and batches that weigh differently."""
    stage, ranks, clipping, batches, place = case
    world, (judged, trainer) = RANKS[ranks], CLIPPING[clipping]
    accumulated, added = BATCHES[batches]
    options = {**STAGES[stage], **judged, **PLACES[place], **added, "bucket_size_mb": 1e-2}
    if place == "file":
        options["offload_optimizer"] = f"nvme:{tmp_path}"
    trainer = {**trainer, "accumulate_grad_batches": accumulated}
    run = with_defaults({"trainer": trainer, "size": 18})
    results = run_offloaded("zero_offload", options, world, {**run, "batch_size": 4 // world})
    assert_same_numbers(results, run, world)
    for result in results:
        bytes_each = result["host_bytes"] / result["parameters"]
        sums = 8 if added and place != "parameters" else 0
        low, high = {"half": (16, 21), "parameters": (24, 24)}.get(place, (32, 32))
        assert low + sums <= bytes_each <= high + sums
        streams = clipping != "by norm" and place != "parameters"
        assert bool(result["early"]) == streams
    weights = results[0]["weights"]
    tied = weights["model.head.weight"].numel()
    shards = sum(result["parameters"] for result in results)
    assert shards == sum(w.numel() for w in weights.values()) - tied
