"""Offloaded optimizers in 16 bits: masters on the host, overflows, gradients not finite."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_par.callbacks import MixedPrecision
from lightning_par.errors import NonFiniteError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import KINDS, run_offloaded
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

RUN: dict[str, Any] = {"batch_size": 4, "size": 20, "ignored": True, "module": {"blocks": 2}}
ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def masters() -> list[Callback]:
    return [MixedPrecision("bf16-true")]


@pytest.mark.parametrize(
    ("given", "world", "more"),
    [
        (True, 1, {}),
        (False, 1, {}),
        (True, 2, {}),
        (False, 2, {"stage": 1}),
        (True, 2, {"stage": 3, "offload_parameters": True}),
    ],
)
def test_bfloat16_weights_follow_float32_masters(
    given: bool, world: int, more: dict[str, Any]
) -> None:
    """The reference keeps its masters on the device. The first gradients are equal; a master then
    differs by a few roundings of 6e-8, and its weight hardly ever, by the last of 8 digits. From
    there Adam makes as much of a gradient that is zero but for rounding as of any other, so that
    later only losses can be compared.
    """
    named = {"callbacks": masters} if given else {}
    part = {**RUN, "batch_size": 4 // world}
    run = {**part, "trainer": {"precision": "32-true" if given else "bf16-true"}}
    results = run_offloaded("zero_offload", more, world, run, **named)
    run = {**part, "trainer": {"precision": "32-true"}}
    options = {**ONE, "zero_stage": more.get("stage", 2)}
    references = run_offloaded("hybrid3d", options, world, run, callbacks=masters)
    for result, wanted in zip(results, references, strict=True):
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=2e-3, atol=0)
        # bf16: a slot of 2 bytes, a master and two moments of 4.
        slot = 0 if "offload_parameters" in more else 2
        assert result["host_bytes"] == (12 + slot) * result["parameters"]
        pairs = list(zip(result["steps"][0], wanted["steps"][0], strict=True))
        for weight, same in pairs:
            assert weight.dtype is torch.bfloat16
            torch.testing.assert_close(weight, same, rtol=2**-7, atol=1e-8)
        assert sum(int((a != b).sum()) for a, b in pairs) < 1e-3 * result["parameters"]


def test_moments_in_bfloat16_take_10_bytes() -> None:
    run = {**RUN, "trainer": {"precision": "bf16-true"}}
    (result,) = run_offloaded("zero_offload", {"state_dtype": "bfloat16"}, 1, run)
    (wide,) = run_offloaded("zero_offload", {}, 1, run)
    assert result["host_bytes"] == 10 * result["parameters"]
    torch.testing.assert_close(result["losses"], wide["losses"], rtol=2e-2, atol=0)


class Spoil(Callback):
    """Makes the gradient of a weight infinite in the second step, on rank 1 or the only one."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def spoil(grad: Tensor) -> Tensor:
            last = trainer.global_rank == trainer.world_size - 1
            now = trainer.fit_loop.total_batch_idx == 1
            return grad * float("inf") if now and last else grad

        def watch(module: Any, args: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(spoil)

        pl_module.model.norm.register_forward_hook(watch)


def scaled() -> list[Callback]:
    return [MixedPrecision("16-mixed", init_scale=2.0**10, growth_interval=2), Spoil()]


def spoiled() -> list[Callback]:
    return [Spoil()]


SCALED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1 rank": ("zero_offload", 1, {}),
    "2 ranks": ("zero_offload", 2, {}),
    "tp2": ("hybrid3d", 2, {**ONE, "tensor_parallel_size": 2}),
    "pp2": ("hybrid3d", 2, {**ONE, "pipeline_parallel_size": 2}),
    "cp2": ("hybrid3d", 2, {**ONE, "context_parallel_size": 2}),
}


@pytest.mark.parametrize(
    ("delayed", "name"),
    [
        *((False, name) for name in SCALED),
        *((0, name) for name in ("2 ranks", "pp2")),  # test_delayed.py has every axis
        *(pytest.param(0, n, marks=pytest.mark.exhaustive) for n in ("1 rank", "tp2", "cp2")),
    ],
)
def test_overflow_leaves_the_step_out_on_every_rank(name: str, delayed: Any) -> None:
    strategy, world, options = SCALED[name]
    replicas = world if strategy == "zero_offload" else 1
    run = {**RUN, "batch_size": 4 // replicas, "trainer": {"precision": "32-true"}}
    run["trainer"]["gradient_clip_val"] = 0.5
    offload = {"delayed_update": delayed}
    options = {**options, **(offload if replicas == world else {"offload_options": offload})}
    results = run_offloaded(strategy, options, world, run, callbacks=scaled)
    for result in results:
        steps = result["steps"]
        moved = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(steps)]
        # Delayed, the weights after step s lack its update: that of step 0 comes with the
        # backward of step 1, whose own never comes.
        assert moved == (
            [False, True, True, True] if delayed is False else [True, False, True, True]
        )
        assert result["losses"] == results[0]["losses"]
    if replicas < world:
        (alone,) = run_offloaded("zero_offload", offload, 1, run, callbacks=scaled)
        torch.testing.assert_close(results[0]["losses"], alone["losses"], rtol=5e-3, atol=0)


def test_scaled_run_is_as_close_as_float16_to_one_in_float32() -> None:
    run = {**RUN, "trainer": {"precision": "32-true", "gradient_clip_val": 0.5}}
    (wide,) = run_offloaded("zero_offload", {}, 1, run)
    (short,) = run_offloaded("zero_offload", {}, 1, run, callbacks=unspoiled)
    torch.testing.assert_close(short["losses"], wide["losses"], rtol=5e-3, atol=0)


def unspoiled() -> list[Callback]:
    return [MixedPrecision("16-mixed", init_scale=2.0**10)]


def test_nonfinite_gradient_leaves_the_step_out_if_that_is_asked() -> None:
    run = {**RUN, "batch_size": 2, "trainer": {"precision": "32-true"}}
    options = {"on_nonfinite": "skip"}
    for result in run_offloaded("zero_offload", options, 2, run, callbacks=spoiled):
        steps = result["steps"]
        moved = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(steps)]
        assert moved == [False, True, True, True]


def raise_on_rank(rank: int, world: int) -> str:
    strategy = KINDS["zero_offload"]()
    trainer = quiet_trainer(strategy=strategy, devices=world, max_epochs=1, callbacks=spoiled())
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(ToyModule(blocks=2), loader(ToyData(8), 2))
    return str(caught.value)


def test_nonfinite_gradient_that_has_left_is_named_on_every_rank() -> None:
    one, two = run_ranks(raise_on_rank, 2, timeout=120)
    assert one == two
    said = "the loss or a gradient is not finite (the norm of the loss and all gradients is nan)"
    assert f"step 1: {said}" in one
    assert "a gradient of model." in one


@pytest.mark.parametrize("more", [{}, {"offload_fraction": 0.5}, {"accumulate_on": "host"}])
def test_gradients_that_have_left_are_counted_where_they_underflow(more: dict[str, Any]) -> None:
    """As many as on the device: only the first rounding of the loss may differ."""
    trainer = {"precision": "32-true", "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    run = {**RUN, "batch_size": 2, "trainer": trainer}
    away = run_offloaded("zero_offload", more, 2, run, callbacks=unspoiled)
    here = run_offloaded("hybrid3d", {**ONE, "zero_stage": 2}, 2, run, callbacks=unspoiled)
    for one, two in zip(away, here, strict=True):
        share = one["logged"]["precision/underflow"]
        assert 0 < share < 1
        assert abs(share - two["logged"]["precision/underflow"]) < 0.02
