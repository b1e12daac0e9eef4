"""Step times that the planner predicts for this machine, against those that are measured.

The machine is measured by what ``lightning-par calibrate`` calls; then twelve layouts of one GPT
train on 1 to 4 ranks with the same samples in a step. Nothing is fitted on those.

Every layout has ranks of its own, as a run has: several in the same ranks would share the cores
with the threads of the others' idle groups. The layouts take turns, `--pairs` times.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _gpt import BenchModule, loader, TOKENS
from _paired import add_arguments, Arguments, fit, launch, read_arguments
from torchmetrics.functional import spearman_corrcoef

from lightning_par.commands.calibrate import as_profile
from lightning_par.inference.lookup import find_plan
from lightning_par.planner.block_trace import shape_of
from lightning_par.planner.profiles import DeviceProfile, implementation, load_profile
from lightning_par.planner.search import Candidate, Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.profiling.calibration import measure
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies import Hybrid3DStrategy

RANKS, SAMPLES = 4, 8
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
TWO, FOUR = {"num_microbatches": 2}, {"num_microbatches": 4}
Options = dict[str, Any]
LAYOUTS: dict[str, tuple[int, Options]] = {
    "one device": (1, ONES),
    "tp 2": (2, {**ONES, "tensor_parallel_size": 2}),
    "pp 2": (2, {**ONES, "pipeline_parallel_size": 2, **FOUR}),
    "dp 2, ZeRO 1": (2, {**ONES, "zero_stage": 1}),
    "dp 2, ZeRO 3": (2, {**ONES, "zero_stage": 3}),
    "cp 2": (2, {**ONES, "context_parallel_size": 2, "zero_stage": 1}),
    "tp 4": (4, {**ONES, "tensor_parallel_size": 4}),
    "pp 4": (4, {**ONES, "pipeline_parallel_size": 4, **FOUR}),
    "dp 4, ZeRO 1": (4, {**ONES, "zero_stage": 1}),
    "tp 2 x pp 2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **TWO}),
    "tp 2 x dp 2": (4, {**ONES, "tensor_parallel_size": 2, "zero_stage": 1}),
    "pp 2 x dp 2": (4, {**ONES, "pipeline_parallel_size": 2, "zero_stage": 1, **TWO}),
}


def calibrate(path: Path, arguments: Arguments) -> None:
    """Measure the machine on every rank, and write the profile on rank 0."""
    found = measure(torch.device("cpu"), torch.float32, RANKS)
    if dist.get_rank() == 0:
        entry, networks = as_profile("here", found, local=RANKS, source="measured")
        path.write_text(json.dumps({"devices": {"here": entry}, "networks": networks}))
        print(found, flush=True)


class _Stopwatch:
    """Notes when every step begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def next(self) -> None:
        """Note that a step begins."""
        self.times.append(time.perf_counter())


def train(path: Path, options: Options, arguments: Arguments) -> None:
    """Train a layout; write the times of its steps after the first ones."""
    ranks, strategy = dist.get_world_size(), Hybrid3DStrategy(**options, verify=False)
    replicas = strategy.options.fit_sizes(ranks, ranks).data
    watch = _Stopwatch()
    fit(BenchModule(), loader(SAMPLES // replicas), strategy, watch, arguments)
    if dist.get_rank() == 0:
        times = watch.times[arguments.warmup * arguments.steps :]
        path.write_text(json.dumps([b - a for a, b in pairwise(times)]))


def predict(planner: Planner, ranks: int, options: Options) -> Candidate:
    """Return the prediction for the options of a strategy."""
    chosen = Hybrid3DStrategy(**options).options
    sizes: ParallelSizes = chosen.fit_sizes(ranks, ranks)
    pieces = options.get("num_microbatches", 1)
    layout = Layout(
        sizes=sizes,
        micro_batch=SAMPLES // sizes.data // pieces,
        microbatches=pieces,
        zero_stage=chosen.zero_stage,
        schedule=chosen.schedule,
        sequence_parallel=chosen.sequence_parallel,
    )
    return planner.predict(layout)


def _shape(device: DeviceProfile) -> TransformerShape:
    module = BenchModule()
    module.configure_model()
    batch, plan = next(iter(loader(2))), find_plan(module)
    assert plan is not None
    return shape_of(
        module,
        TOKENS,
        plan=lambda: plan,
        example=lambda: batch,
        eager=device.runs_eagerly,
    )


def main() -> None:
    """Measure, predict, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.set_defaults(pairs=3, steps=8, warmup=1)
    arguments = read_arguments(parser.parse_args())
    turn = replace(arguments, pairs=1)  # of one layout
    with tempfile.TemporaryDirectory() as folder:
        profile, times = Path(folder) / "profile.json", Path(folder) / "times.json"
        launch(partial(calibrate, profile), arguments, ranks=RANKS)
        device = load_profile("here", profile)
        steps: dict[str, list[float]] = {name: [] for name in LAYOUTS}
        for _ in range(arguments.pairs):
            for name, (ranks, options) in LAYOUTS.items():
                launch(partial(train, times, options), turn, ranks=ranks)
                steps[name] += json.loads(times.read_text())
    measured = {name: statistics.median(found) for name, found in steps.items()}
    code = implementation("32-true", device)
    planner = Planner(shape=_shape(device), device=device, code=code)
    predicted = {name: predict(planner, *LAYOUTS[name]).time for name in measured}
    print(f"{'':14}  measured  predicted  error  where the prediction goes, ms")
    for name, seconds in measured.items():
        time = predicted[name]
        parts = ", ".join(f"{k} {1e3 * v:.0f}" for k, v in time.parts.items() if v > 5e-4)
        error = time.seconds / seconds - 1
        print(f"{name:14}  {1e3 * seconds:8.1f}  {1e3 * time.seconds:9.1f}  {error:+5.0%}  {parts}")
    pairs = [(predicted[name].seconds, seconds) for name, seconds in measured.items()]
    error = statistics.mean(abs(p / m - 1) for p, m in pairs)
    correlation = float(spearman_corrcoef(*torch.tensor(pairs).T))
    print(f"mean error {error:.1%} (<= 20 %), rank correlation {correlation:.2f} (>= 0.9)")


if __name__ == "__main__":
    main()
