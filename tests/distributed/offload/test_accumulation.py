"""Gradients of several batches that are added up on the host."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

import lightning_par
from lightning_par.callbacks import MixedPrecision
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.comm_volume import CommVolume
from tests.distributed.offload.test_parity import (
    assert_as_one_process,
    HYBRID,
    IGNORE,
    PP2,
    TP2,
    with_defaults,
)
from tests.distributed.offload.test_precision import Spoil
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import KINDS, run_offloaded, same_weights, train_offloaded
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks

HOST = {"accumulate_on": "host"}
CLIPPED = {"gradient_clip_val": 0.05}
TWO: dict[str, Any] = {"accumulate_grad_batches": 2}

CASES: dict[str, tuple[str, dict[str, Any], int, int, dict[str, Any]]] = {
    "stage 1 on 1 rank, free": ("zero_offload", {"stage": 1, **IGNORE}, 1, 1, TWO),
    "stage 2 on 2 ranks, clipped": ("zero_offload", {"stage": 2}, 2, 2, {**TWO, **CLIPPED}),
    "stage 3 on 2 ranks, small buckets": (
        "zero_offload",
        {"stage": 3, "bucket_size_mb": 1e-3, "overlap": "off"},
        2,
        2,
        {"accumulate_grad_batches": 3},
    ),
    "tp2, by value": (
        "hybrid3d",
        {**TP2, **IGNORE},
        2,
        1,
        {**TWO, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ),
    "pp2, clipped": ("hybrid3d", PP2, 2, 1, {**TWO, **CLIPPED}),
    "whole replicas": ("hybrid3d", {**HYBRID, "zero_stage": 0}, 2, 2, TWO),
}


class Watch(Callback):
    """Whether gradients are on the device between two batches, and the bytes of a step's copies."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.comm_volume = CommVolume({})
        self.comm_volume.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        left = any(p.grad is not None for p in own_parameters(pl_module).values())
        self.seen["on device"] = self.seen.get("on device", False) or left
        self.seen.setdefault("steps", []).append(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.comm_volume.__exit__(None, None, None)
        own = [
            p.to_local() if isinstance(p, DTensor) else p
            for p in own_parameters(pl_module).values()
        ]
        size = sum(p.numel() * p.element_size() for p in own)
        self.seen["copies"] = self.comm_volume.total(operation="to_host").payload / size


def watched(rank: int, world: int, *job: Any) -> Any:
    seen: dict[str, Any] = {}
    result = train_offloaded(rank, world, *job, callbacks=lambda: [Watch(seen)])
    return {**result, "seen": seen}


@pytest.mark.parametrize("name", CASES)
def test_sum_on_the_host_equals_one_process(name: str) -> None:
    strategy, options, world, replicas, trainer = CASES[name]
    run = with_defaults({"trainer": trainer, "size": 20})
    part = {**run, "batch_size": run["batch_size"] // replicas}
    place = {"offload_options": HOST} if "offload_options" in options else HOST
    results = run_ranks(watched, world, strategy, {**options, **place}, part, timeout=120)
    assert_as_one_process(results, run, replicas)
    for result in results:
        # Master, two moments, a slot and a sum of 8 bytes each; every batch sent its gradients.
        assert result["host_bytes"] == 40 * result["parameters"]
        assert result["seen"]["copies"] == len(result["seen"]["steps"]) == 5
        assert result["seen"]["on device"] is False


def test_gradients_stay_on_the_device_otherwise() -> None:
    """What the test above would see if they did."""
    run = with_defaults({"trainer": TWO, "size": 20})
    (result,) = run_ranks(watched, 1, "zero_offload", {}, run, timeout=120)
    assert result["seen"]["on device"] is True
    assert result["seen"]["copies"] == 3
    assert result["host_bytes"] == 32 * result["parameters"]


@pytest.mark.parametrize("start", [0, 1])
def test_delayed_update_of_a_sum(start: int) -> None:
    """It leaves while the next step's batches are added up."""
    run = with_defaults({"trainer": TWO, "size": 24})
    on_host, on_device = (
        run_offloaded("zero_offload", {"delayed_update": start, "accumulate_on": place}, 1, run)[0]
        for place in ("host", "device")
    )
    torch.testing.assert_close(on_host["losses"], on_device["losses"], rtol=0, atol=1e-12)
    for one, two in zip(on_host["steps"][-1], on_device["steps"][-1], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    assert on_host["host_bytes"] == (40 + 2 * 8) * on_host["parameters"]


def test_sum_of_short_gradients_is_long() -> None:
    """Each batch's gradient is rounded to bfloat16 once, and their sum is not."""
    run = with_defaults({"trainer": {"precision": "bf16-true", **TWO}, "size": 16})
    (result,) = run_offloaded("zero_offload", HOST, 1, run)
    # A slot of 2 bytes; master, two moments and a sum of 4.
    assert result["host_bytes"] == 18 * result["parameters"]
    (other,) = run_offloaded("zero_offload", {}, 1, run)
    torch.testing.assert_close(result["losses"], other["losses"], rtol=2e-2, atol=0)


@pytest.mark.parametrize("trainer", [TWO, {**TWO, **CLIPPED}])
def test_parameters_on_the_host_add_up_there(trainer: dict[str, Any]) -> None:
    run = with_defaults({"trainer": trainer, "size": 20})
    options = {"stage": 3, "offload_parameters": True, **HOST}
    results = run_offloaded("zero_offload", options, 2, {**run, "batch_size": 2})
    assert_as_one_process(results, run, 2)


def scaled() -> list[Callback]:
    return [MixedPrecision("16-mixed", init_scale=2.0**10, growth_interval=2), Spoil()]


def test_overflow_in_one_batch_leaves_its_step_out() -> None:
    """The second batch of the first step, on rank 1."""
    trainer = {"precision": "32-true", "gradient_clip_val": 0.5, **TWO}
    run = {"batch_size": 2, "size": 24, "ignored": True, "trainer": trainer}
    for result in run_offloaded("zero_offload", HOST, 2, run, callbacks=scaled):
        steps = result["steps"]
        moved = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(steps)]
        assert moved == [False, False, True, False, True]


def test_nothing_is_added_up_if_every_batch_is_a_step() -> None:
    run = with_defaults({"trainer": {"precision": "32-true"}})
    options = {**IGNORE, "bucket_size_mb": 1e-3}
    (one,), (two,) = (
        run_offloaded("zero_offload", {**options, "accumulate_on": place}, 1, run)
        for place in ("host", "device")
    )
    assert same_weights(one, two)
    assert one["host_bytes"] == two["host_bytes"]
    assert one["early"] == two["early"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate_on": "disk"}, r"accumulate_on='disk' must be 'device' or 'host'"),
        (
            {"accumulate_on": "host", "offload_fraction": 0.5},
            r"accumulate_on='host' is not supported with offload_fraction=0.5, .* Use only one",
        ),
    ],
)
def test_choices_that_do_not_exist(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        KINDS["zero_offload"](**options)


class Halve(Callback):
    """Halves every weight between two batches of a step."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 2:
            with torch.no_grad():
                for parameter in own_parameters(pl_module).values():
                    parameter.mul_(0.5)


def halving() -> list[Callback]:
    return [Halve()]


@pytest.mark.parametrize("place", ["device", "host"])
def test_weights_changed_between_two_batches_of_a_step_count(place: str) -> None:
    run = {"batch_size": 4, "size": 20, "trainer": TWO}
    (found,) = run_offloaded("zero_offload", {"accumulate_on": place}, 1, run, callbacks=halving)
    (wanted,) = run_offloaded(
        "hybrid3d", HYBRID | {"offload_options": None}, 1, run, callbacks=halving
    )
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=1e-10)


class NoLoss(ToyModule):
    """The last batch of the first step has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def train_without(rank: int, world: int, options: dict[str, Any] | None) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    strategy = lightning_par.Hybrid3DStrategy(**sizes, offload_options=options)
    trainer = quiet_trainer(
        strategy=strategy, devices=1, max_epochs=1, precision="64-true", **TWO, limit_val_batches=0
    )
    trainer.fit(NoLoss(), loader(ToyData(16), 4))
    return {k: v.clone() for k, v in strategy.gather_state_dict().items()}


@pytest.mark.parametrize("options", [{}, HOST, {**HOST, "delayed_update": 5}])
def test_last_batch_without_a_loss_ends_its_step(options: dict[str, Any]) -> None:
    """The Trainer then steps with the gradients of the batches before."""
    (wanted,) = run_ranks(train_without, 1, None)
    (found,) = run_ranks(train_without, 1, options)
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-10)
