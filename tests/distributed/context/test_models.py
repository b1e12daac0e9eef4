"""An encoder with padding, packed documents and the reference GPT on divided sequences equal one
process: losses, gradients, weights, what is logged and metrics.
"""

from functools import cache
from typing import Any

import pytest
import torch

from lightning_par import Hybrid3DStrategy
from tests.support.models.encoder import train_model
from tests.support.parity import Result, TOLERANCE
from tests.support.ranks.api import run_ranks

HYBRID = {"method": "hybrid", "ulysses_size": 2}
CASES = {
    "encoder cp2": ("encoder", {"context_parallel_size": 2}),
    "encoder cp4 hybrid": ("encoder", {"context_parallel_size": 4, "context_options": HYBRID}),
    "encoder cp2 pp2": ("encoder", {"context_parallel_size": 2, "pipeline_parallel_size": 2}),
    "packed cp2": ("packed", {"context_parallel_size": 2}),
    "packed cp4 ring": (
        "packed",
        {"context_parallel_size": 4, "context_options": {"route": "ring", "layout": "contiguous"}},
    ),
    "gpt cp2 tp2": ("gpt", {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "gpt cp2 pp2": ("gpt", {"context_parallel_size": 2, "pipeline_parallel_size": 2}),
    "gpt learned cp2 tp2": (
        "gpt learned",
        {"context_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "gpt cp2 tp2 pp2": (
        "gpt",
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
}
QUICK = ("encoder cp2", "encoder cp2 pp2", "packed cp4 ring", "gpt cp2 tp2", "gpt cp2 pp2")


def train_rank(rank: int, world: int, model: str, options: dict[str, Any]) -> Result:
    sizes = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "data")}
    strategy = Hybrid3DStrategy(**{**sizes, "num_microbatches": "auto", **options})
    return train_model(model, strategy, world, 4)


@cache
def one_process(model: str) -> Result:
    try:
        return train_model(model, "auto", 1, 4)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]
)
def test_model_on_divided_sequences_equals_one_process(name: str) -> None:
    model, options = CASES[name]
    sizes = [v for k, v in options.items() if k.endswith("_size")]
    wanted = one_process(model)
    results: list[Result] = run_ranks(
        train_rank, torch.Size(sizes).numel(), model, options, timeout=120
    )
    close = {"atol": TOLERANCE, "rtol": 0}
    for result in results:
        torch.testing.assert_close(result["losses"], wanted["losses"], **close)
        torch.testing.assert_close(result["logged"], wanted["logged"], atol=1e-9, rtol=0)
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for parameter, grad in got.items():
                known = parameter if parameter in want else "model.embed.weight"
                torch.testing.assert_close(grad, want[known], **close)
    weights = results[0]["weights"]
    assert list(weights) == list(wanted["weights"])
    for parameter, weight in weights.items():
        torch.testing.assert_close(weight, wanted["weights"][parameter], **close)
