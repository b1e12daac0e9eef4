"""The monitors through the Trainer: a mesh counts what one process counts, and logs what holds."""

from typing import Any

import pytest

from lightning_par.callbacks import MemoryMonitor, ThroughputMonitor
from lightning_par.errors import ConfigurationError
from tests.support.models.toy_gpt import loader, TOKENS, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.contract
BATCH, STEPS, PEAK = 8, 3, 1e12
Run = dict[str, Any]


def fit(rank: int, world: int, options: Run | None, run: Run) -> Run:
    import lightning_par

    throughput, memory = ThroughputMonitor(peak_flops=PEAK), MemoryMonitor()
    strategy: Any = "auto" if options is None else lightning_par.Hybrid3DStrategy(**options)
    module = ToyModule(**run.get("module", {}))
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_steps=STEPS,
        log_every_n_steps=1,
        callbacks=[throughput, memory],
    )
    replicas = run.get("replicas", 1)
    trainer.fit(module, loader(ToyData(64), BATCH // replicas), loader(ToyData(8), 8))
    return {
        "model": throughput.counted.model,
        "recomputed": throughput.counted.recomputed,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "parameters": sum(p.numel() for p in module.parameters()) * 4,
    }


LAYOUTS: dict[str, tuple[int, Run, Run]] = {
    "tp2": (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}, {}),
    "pp2": (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, {}),
    "dp2": (
        2,
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3},
        {"replicas": 2},
    ),
    "pp2, split backward": (
        2,
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "schedule": "zb-h1"},
        {},
    ),
}


def one_process(**run: Any) -> Run:
    (found,) = run_ranks(fit, 1, None, run)
    return dict(found)


@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_together_count_the_flops_of_one_process(recompute: bool) -> None:
    module = {"module": {"recompute": recompute}}
    wanted = one_process(**module)
    assert (wanted["recomputed"] > 0) is recompute
    for layout, (world, options, run) in LAYOUTS.items():
        if recompute and "split" in layout:
            continue
        found = run_ranks(fit, world, options, {**run, **module}, timeout=120)
        assert sum(r["model"] for r in found) == wanted["model"], layout
        assert sum(r["recomputed"] for r in found) == wanted["recomputed"], layout
        check_throughput(found, wanted["model"], world)


def check_throughput(found: list[Run], model: int, world: int) -> None:
    """A batch of all replicas in the time of a step; the same on every rank."""
    for result in found:
        of = {k: v for k, v in result["metrics"].items() if k.startswith("throughput/")}
        assert of.items() <= found[0]["metrics"].items()
        seconds = of["throughput/step"] / 1e3
        assert of["throughput/samples"] * seconds == pytest.approx(BATCH)
        assert of["throughput/tokens"] * seconds == pytest.approx(BATCH * TOKENS)
        rate = model / world / seconds
        assert of["throughput/model_flops"] == pytest.approx(rate / 1e12)
        assert of["throughput/mfu"] == pytest.approx(rate / PEAK)
        assert of["throughput/hardware_flops"] >= of["throughput/model_flops"]


def memory_of(result: Run) -> dict[str, float]:
    """MiB, by key without the prefix."""
    pairs = result["metrics"].items()
    return {k.removeprefix("memory/"): v for k, v in pairs if k.startswith("memory/")}


def test_memory_is_split_into_its_kinds_and_shards_are_smaller() -> None:
    one = one_process()
    whole = memory_of(one)
    size = one["parameters"] / 2**20
    assert whole["parameters"] == pytest.approx(size, rel=1e-6)
    assert whole["gradients"] == pytest.approx(size, rel=1e-6)
    assert whole["optimizer"] == pytest.approx(2 * size, rel=0.01)  # and the number of steps
    assert whole["peak"] >= 0.99 * whole["current"]  # the first is read a moment before
    assert whole["current"] > whole["optimizer"]
    world, options, run = LAYOUTS["dp2"]
    sharded = run_ranks(fit, world, options, run, timeout=120)
    for result in sharded:
        of = memory_of(result)
        assert of == memory_of(sharded[0])
        for kind in ("parameters", "gradients", "optimizer"):
            assert of[kind] == pytest.approx(whole[kind] / 2, rel=0.05)
            assert of[kind] == max(of[f"rank_0/{kind}"], of[f"rank_1/{kind}"])
        assert of["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01)


def test_a_pipeline_holds_as_many_micro_batches_as_its_schedule_says() -> None:
    world, options, _ = LAYOUTS["pp2"]
    held = {}
    for schedule, count in (("gpipe", 4), ("gpipe", 8), ("1f1b", 8)):
        options = {**options, "schedule": schedule, "num_microbatches": count}
        found = run_ranks(fit, world, options, {}, timeout=120)
        held[schedule, count] = memory_of(found[0])["rank_0/activations"]
    # Four or eight parts of one batch take the same room; two of eight take a quarter.
    assert held["gpipe", 4] == pytest.approx(held["gpipe", 8], rel=0.02)
    assert held["1f1b", 8] == pytest.approx(held["gpipe", 8] / 4, rel=0.02)


@pytest.mark.parametrize("peak", [0, -989e12])
def test_a_peak_that_is_none_is_refused(peak: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"peak_flops={peak}.*989e12"):
        ThroughputMonitor(peak_flops=peak)
