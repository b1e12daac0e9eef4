"""An optimizer on the host computes what one on the device does."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import ParallelPlan
from tests.support.exhaustive import some
from tests.support.offload_runs import KINDS, run_offloaded, same_weights
from tests.support.parity import one_process, quiet_trainer, Result, TOLERANCE
from tests.support.ranks.api import run_ranks

HYBRID: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "offload_options": {},
}
CLIPPED = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
IGNORE = {"on_nonfinite": "ignore"}
GROUPS = {"optimizer": "groups"}
TP2 = {**HYBRID, "tensor_parallel_size": 2}
PP2 = {**HYBRID, "pipeline_parallel_size": 2}

Case = tuple[str, dict[str, Any], int, int, dict[str, Any]]
"""Strategy, its options, ranks, replicas, and the run."""

CASES: dict[str, Case] = {
    "stage 1 on 1 rank": ("zero_offload", {"stage": 1}, 1, 1, {}),
    "stage 2 on 1 rank, groups": ("zero_offload", IGNORE, 1, 1, {"module": GROUPS}),
    "stage 3 on 1 rank, clipped": ("zero_offload", {"stage": 3}, 1, 1, {"trainer": CLIPPED}),
    "stage 1 on 2 ranks, clipped": ("zero_offload", {"stage": 1}, 2, 2, {"trainer": CLIPPED}),
    "stage 2 on 2 ranks, groups": ("zero_offload", {"stage": 2}, 2, 2, {"module": GROUPS}),
    "stage 2 on 2 ranks, by value": (
        "zero_offload",
        IGNORE,
        2,
        2,
        {"trainer": BY_VALUE},
    ),
    "stage 3 on 2 ranks, accumulating": (
        "zero_offload",
        {"stage": 3, "cpu_kernel": "torch"},
        2,
        2,
        {"trainer": {"accumulate_grad_batches": 2, **CLIPPED}, "size": 18},
    ),
    "stage 1 on 2 ranks, accumulating": (
        "zero_offload",
        {"stage": 1, **IGNORE},
        2,
        2,
        {"trainer": {"accumulate_grad_batches": 2}, "size": 18},
    ),
    "accumulating on 1 rank": (
        "zero_offload",
        IGNORE,
        1,
        1,
        {"trainer": {"accumulate_grad_batches": 2}, "size": 18},
    ),
    "whole replicas": ("hybrid3d", {**HYBRID, "zero_stage": 0}, 2, 2, {"trainer": CLIPPED}),
    "tp2, clipped": ("hybrid3d", TP2, 2, 1, {"trainer": CLIPPED}),
    "tp2, by value": ("hybrid3d", {**TP2, **IGNORE}, 2, 1, {"trainer": BY_VALUE}),
    "pp2, clipped": ("hybrid3d", PP2, 2, 1, {"trainer": CLIPPED}),
    "pp2, groups": ("hybrid3d", {**PP2, **IGNORE}, 2, 1, {"module": GROUPS}),
}

ELSEWHERE = {
    "stage 1 on 1 rank",
    "stage 3 on 1 rank, clipped",
    "stage 1 on 2 ranks, clipped",
    "stage 2 on 2 ranks, by value",
    "stage 1 on 2 ranks, accumulating",
    "accumulating on 1 rank",
    "tp2, clipped",
    "tp2, by value",
    "pp2, groups",
}
"""What test_matrix.py and test_axes.py run, too, but for a value or two; for `make test-all`."""


def with_defaults(run: dict[str, Any]) -> dict[str, Any]:
    return {"batch_size": 4, "size": 12, "ignored": True, **run}


def assert_as_one_process(results: list[Result], run: dict[str, Any], replicas: int) -> None:
    whole = one_process(repr(run))
    close = {"rtol": 0, "atol": TOLERANCE}
    assert len(whole["losses"]) >= 3
    for result in results:
        torch.testing.assert_close(result["losses"], whole["losses"], **close)
        torch.testing.assert_close(result["val_loss"], whole["val_loss"], **close)
        # All gradients have left when the optimizer steps.
        assert all(grad is None for step in result["gradients"] for grad in step.values())
    assert list(results[0]["weights"]) == list(whole["weights"])
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(weight, whole["weights"][name], **close)


@pytest.mark.parametrize(
    "name",
    some(CASES, ELSEWHERE),
)
def test_offloaded_equals_one_process(name: str) -> None:
    """float64 all the way: sums in another order differ by about 1e-15 a step."""
    strategy, options, world, replicas, run = CASES[name]
    run = with_defaults(run)
    part = {**run, "batch_size": run["batch_size"] // replicas}
    results = run_offloaded(strategy, options, world, part)
    assert_as_one_process(results, run, replicas)
    for result in results:
        assert result["kernel"] == options.get("cpu_kernel", "native")
        # Master, two moments and a slot of 8 bytes each.
        assert result["host_bytes"] == 32 * result["parameters"]
        assert result["states"] == result["shapes"]
    if replicas == 2 and options.get("zero_stage") != 0:
        held = [result["parameters"] for result in results]
        assert sum(held) == sum(w.numel() for w in results[0]["weights"].values()) - tied(results)


def tied(results: list[Result]) -> int:
    """The head is the embedding, which the state dict names twice."""
    return results[0]["weights"]["model.head.weight"].numel()


class Narrow(pl.LightningModule):
    """Has weights of one row, of which all but the first replica hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.last(self.first(batch[0]).tanh()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_narrow(rank: int, world: int, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Every epoch is one step on all four samples."""
    torch.set_default_dtype(torch.float64)
    module = Narrow()
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(4, 5, generator=generator))
    trainer = quiet_trainer(
        strategy="auto" if options is None else KINDS["zero_offload"](**options),
        devices=world,
        max_epochs=4,
        precision="64-true",
        gradient_clip_val=0.05,
    )
    trainer.fit(module, DataLoader(samples, batch_size=4 // world))
    whole = getattr(trainer.strategy, "gather_state_dict", module.state_dict)()
    return {name: weight.detach().clone() for name, weight in whole.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_replica_that_holds_nothing_of_a_weight_takes_part(stage: int) -> None:
    (wanted,) = run_ranks(train_narrow, 1, None, timeout=120)
    found = run_ranks(train_narrow, 2, {"stage": stage}, timeout=120)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


SMALL = {"bucket_size_mb": 1e-3}


@pytest.mark.parametrize("world", [1, 2])
def test_streamed_equals_synchronous_bit_for_bit(world: int) -> None:
    run = with_defaults({"trainer": {"precision": "32-true"}, "batch_size": 4 // world})
    streamed, off = (
        run_offloaded("zero_offload", {**IGNORE, **SMALL, "overlap": overlap}, world, run)
        for overlap in ("auto", "off")
    )
    for one, two in zip(streamed, off, strict=True):
        assert one["losses"] == two["losses"]
        assert all(map(torch.equal, one["steps"][-1], two["steps"][-1]))
        assert one["early"] > 3 * 5  # several buckets in each of three steps
        assert two["early"] == 0
    assert same_weights(streamed[0], off[0])


@pytest.mark.parametrize("asks", [{"trainer": CLIPPED}, {"on_nonfinite": "raise"}])
def test_nothing_streams_where_all_gradients_have_to_be_known(asks: dict[str, Any]) -> None:
    options = {**IGNORE, **SMALL, **{k: v for k, v in asks.items() if k != "trainer"}}
    run = with_defaults({"trainer": asks.get("trainer", {})})
    (result,) = run_offloaded("zero_offload", options, 1, run)
    assert result["early"] == 0
    assert_as_one_process([result], run, 1)
