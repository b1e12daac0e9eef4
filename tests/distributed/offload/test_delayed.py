"""The delayed update computes what its definition says."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import run_offloaded, same_weights
from tests.support.parity import Result, TOLERANCE

STEPS = 5
NEVER = 10**9
RUN: dict[str, Any] = {"batch_size": 4, "size": 4 * STEPS, "ignored": True, "module": {"blocks": 2}}


@cache
def by_definition(start: int, optimizer: str = "adamw") -> tuple[list[float], list[Tensor]]:
    """Losses and weights in float64; `ahead` holds every update, the model all but the last one."""
    torch.set_default_dtype(torch.float64)
    try:
        module, ahead = (ToyModule(optimizer, blocks=2) for _ in range(2))
        made = ahead.configure_optimizers()
        (steps,), schedulers = made if isinstance(made, tuple) else ([made], [])
        losses = []
        for step, batch in enumerate(loader(ToyData(4 * STEPS, True), 4)):
            module.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            losses.append(float(loss.detach()))
            without_this = [p.detach().clone() for p in ahead.parameters()]
            for mine, theirs in zip(ahead.parameters(), module.parameters(), strict=True):
                mine.grad = theirs.grad
            steps.step()
            for scheduler in schedulers:
                scheduler["scheduler"].step()
            seen_next = without_this if step >= start else list(ahead.parameters())
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), seen_next, strict=True):
                    parameter.copy_(value)
        return losses, [p.detach() for p in ahead.parameters()]
    finally:
        torch.set_default_dtype(torch.float32)


def assert_by_definition(result: Result, start: int, optimizer: str = "adamw") -> None:
    losses, weights = by_definition(start, optimizer)
    torch.testing.assert_close(result["losses"], losses, rtol=0, atol=TOLERANCE)
    found = list(result["weights"])
    found.remove("model.head.weight")  # the embedding again
    for name, wanted in zip(found, weights, strict=True):
        torch.testing.assert_close(result["weights"][name], wanted, rtol=0, atol=TOLERANCE)
    # It is another path than the synchronous one, from the second loss after `start` on.
    synchronous, _ = by_definition(NEVER, optimizer)
    differs = [abs(a - b) > 1e-6 for a, b in zip(losses, synchronous, strict=True)]
    assert differs == [step > start for step in range(STEPS)]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"on_nonfinite": "ignore", "bucket_size_mb": 1e-3}], ids=["judged", "free"]
)
def test_delayed_update_is_the_one_of_its_definition(start: int, options: dict[str, Any]) -> None:
    (result,) = run_offloaded("zero_offload", {**options, "delayed_update": start}, 1, RUN)
    assert_by_definition(result, start)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_delayed_update_is_the_one_of_its_definition_on_every_axis(axis: str) -> None:
    sizes = {f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "context")}
    options = {**sizes, f"{axis}_parallel_size": 2, "offload_options": {"delayed_update": 1}}
    first, second = run_offloaded("hybrid3d", options, 2, RUN)
    assert_by_definition(first, 1)
    for result in (first, second):
        assert result["losses"] == first["losses"]
        assert result["host_bytes"] == 40 * result["parameters"]  # two slots


def test_delayed_update_takes_the_rates_of_its_step() -> None:
    """Both groups have another rate in every step: the next one would be that of another update."""
    run = {**RUN, "module": {"blocks": 2, "optimizer": "groups"}}
    (result,) = run_offloaded("zero_offload", {"delayed_update": 1}, 1, run)
    assert_by_definition(result, 1, "groups")


def test_delayed_on_two_ranks_is_the_one_on_one_rank() -> None:
    """Every replica takes each second sample; so the reference trains on the same batches."""
    options = {"delayed_update": 1, "stage": 3}
    one = run_offloaded("zero_offload", options, 1, RUN)[0]
    for two in run_offloaded("zero_offload", options, 2, {**RUN, "batch_size": 2}):
        torch.testing.assert_close(two["losses"], one["losses"], rtol=0, atol=TOLERANCE)
        # Two slots of 8 bytes, a master and two moments.
        assert two["host_bytes"] == 40 * two["parameters"]


@pytest.mark.parametrize("world", [1, 2])
def test_delay_that_never_starts_is_synchronous_bit_for_bit(world: int) -> None:
    run = {**RUN, "batch_size": 4 // world, "trainer": {"precision": "32-true"}}
    never, synchronous = (
        run_offloaded("zero_offload", {"delayed_update": delay}, world, run)
        for delay in (NEVER, False)
    )
    for one, two in zip(never, synchronous, strict=True):
        assert one["losses"] == two["losses"]
        assert all(map(torch.equal, one["steps"][-1], two["steps"][-1]))
    assert same_weights(never[0], synchronous[0])


def test_clipped_delayed_update_takes_the_clipped_gradient() -> None:
    """With norms cut to 0.05 or 5e-3 Adam's direction stays; a large eps shrinks its length."""
    clipped = {**RUN, "trainer": {"gradient_clip_val": 5e-3}}
    (free,) = run_offloaded("zero_offload", {"delayed_update": 0}, 1, RUN)
    (cut,) = run_offloaded("zero_offload", {"delayed_update": 0}, 1, clipped)
    assert free["losses"][:2] == cut["losses"][:2]
    assert free["losses"][2:] != cut["losses"][2:]
