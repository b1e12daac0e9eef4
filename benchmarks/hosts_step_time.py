"""Step time on two hosts: what is best divided across the link between them?

    python benchmarks/hosts_step_time.py [--gigabits 1] [--pairs 7]

Two hosts of two ranks, namespaces of this machine (which needs root), whose link lets so much
through (tbf). The same GPT, of 3.2 million parameters, 8 x 256 tokens a step, float32. Layouts take
turns, four steps each, in one run of ranks; the ratio is to pipeline stages across hosts.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from tests.support.host_bytes import Layouts
from tests.support.host_runs import start_ranks
from tests.support.hosts import open_hosts, refusal
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer

TOKENS, BATCH, WARM, STEPS = 256, 8, 3, 4
MODEL = {"model_dim": 256, "num_kv_heads": 4}
LAYOUTS: Layouts = {
    "tp 2 inside, pp 2 across": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp 2 inside, dp 2 across, ZeRO 1": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    "tp 2 inside, dp 2 across, ZeRO 3": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "zero_stage": 3,
    },
    "tp 4 across": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "tensor_parallel_across_hosts": True,
    },
}


class _Watch(GPTModule):
    """Notes when the measured steps begin and end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (WARM, WARM + STEPS):
            dist.barrier()
            self.times = [*getattr(self, "times", []), time.perf_counter()]


def measure(out: Path, turns: int) -> None:
    """Train every layout in turn on a rank; rank 0 leaves the seconds of a step in a file."""
    ids = torch.randint(256, (100, TOKENS), generator=torch.Generator().manual_seed(3))
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(turns):
        for name, layout in LAYOUTS.items():
            replicas = 2 if "dp 2" in name else 1
            strategy = Hybrid3DStrategy(data_parallel_size=replicas, **layout)
            trainer = quiet_trainer(
                devices=2,
                num_nodes=2,
                strategy=strategy,
                max_steps=WARM + STEPS + 1,
                limit_val_batches=0,
            )
            module = _Watch(overrides=MODEL)
            batches = loader([{"input_ids": x, "labels": x} for x in ids], BATCH // replicas)
            trainer.fit(module, batches)
            seconds[name].append((module.times[1] - module.times[0]) / STEPS)
    if trainer.is_global_zero:
        torch.save(seconds, out / "seconds.pt")


def main() -> None:
    """Measure, and print a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabits", type=float, default=1, help="of the link; 0: no limit")
    parser.add_argument("--pairs", type=int, default=7, help="how often every layout is measured")
    chosen = parser.parse_args()
    if reason := refusal():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, open_hosts(2, Path(folder)) as hosts:
        if chosen.gigabits:
            hosts[1].limit(round(chosen.gigabits * 1e9))
        start_ranks(hosts, 2, measure, Path(folder), chosen.pairs)
        if hosts.wait(3600) != [0] * 4:
            sys.exit(hosts.texts())
        seconds = torch.load(Path(folder) / "seconds.pt")
    first = seconds[next(iter(LAYOUTS))]
    print("| layout | step, ms | ratio | range |")
    for name, found in seconds.items():
        ratios = sorted(a / b for a, b in zip(found, first, strict=True))
        median = f"{1e3 * statistics.median(found):.0f} | {statistics.median(ratios):.2f}"
        print(f"| {name} | {median} | {ratios[0]:.2f}..{ratios[-1]:.2f} |")


if __name__ == "__main__":
    main()
