"""Step time on two hosts: what is best divided across the link between them?

    python benchmarks/hosts_step_time.py [--gigabits 1] [--milliseconds 1] [--turns 5]

Two hosts of two ranks, namespaces of this machine (which needs root), on two networks: one without
limits, and one that lets so much through (tbf) and takes so long one way (tests/support/cable.c).
The same GPT, of 3.2 million parameters, 8 x 256 tokens a step, float32. Networks and layouts take
turns, five steps each. Where other work takes the cores now and then, the fastest step tells most.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from tests.support.host_bytes import Layouts
from tests.support.host_runs import start_ranks
from tests.support.hosts import delay_refusal, Network, open_hosts
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer

TOKENS, BATCH, WARM, STEPS = 256, 8, 2, 5
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
    """Notes when every step begins."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times = [*getattr(self, "times", []), time.perf_counter()]


def measure(out: Path) -> None:
    """Train every layout on a rank; rank 0 leaves the seconds of every step in a file."""
    ids = torch.randint(256, (100, TOKENS), generator=torch.Generator().manual_seed(3))
    seconds = {
        name: _step_times(layout, ids, 2 if "dp 2" in name else 1)
        for name, layout in LAYOUTS.items()
    }
    if int(os.environ["NODE_RANK"]) == int(os.environ["LOCAL_RANK"]) == 0:
        torch.save(seconds, out / "seconds.pt")


def _step_times(layout: dict[str, Any], ids: torch.Tensor, replicas: int) -> list[float]:
    strategy = Hybrid3DStrategy(data_parallel_size=replicas, **layout)
    place: dict[str, Any] = {"devices": 2, "num_nodes": 2, "strategy": strategy}
    trainer = quiet_trainer(**place, max_steps=WARM + STEPS + 1, limit_val_batches=0)
    module = _Watch(overrides=MODEL)
    trainer.fit(module, loader([{"input_ids": x, "labels": x} for x in ids], BATCH // replicas))
    return [later - earlier for earlier, later in pairwise(module.times[WARM:])]


def main() -> None:
    """Measure, and print a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabits", type=float, default=1, help="of the slow network")
    parser.add_argument("--milliseconds", type=float, default=1, help="its delay")
    parser.add_argument("--turns", type=int, default=5, help="how often every layout is measured")
    chosen = parser.parse_args()
    if reason := delay_refusal():
        sys.exit(reason)
    times: list[dict[str, list[float]]] = [{name: [] for name in LAYOUTS} for _ in range(2)]
    networks = [Network(), Network(ipv4="10.78.0", delay=chosen.milliseconds / 1000)]
    with tempfile.TemporaryDirectory() as folder, open_hosts(2, Path(folder), networks) as hosts:
        hosts[1].limit(round(chosen.gigabits * 1e9), network=1)
        for _ in range(chosen.turns):
            for found, network in zip(times, (0, 1), strict=True):
                address = hosts[0].address(network)  # gloo takes the interface that leads there
                start_ranks(hosts, 2, measure, Path(folder), MASTER_ADDR=address)
                if set(hosts.wait(3600)) != {0}:
                    sys.exit(hosts.texts())
                for name, seconds in torch.load(Path(folder) / "seconds.pt").items():
                    found[name] += seconds
    print("| layout | fastest step, ms | slow link | more | median, ms | slow link |")
    for name in LAYOUTS:
        fastest = [1e3 * min(found[name]) for found in times]
        median = [1e3 * statistics.median(found[name]) for found in times]
        row = f"{fastest[0]:.0f} | {fastest[1]:.0f} | {fastest[1] - fastest[0]:.0f}"
        print(f"| {name} | {row} | {median[0]:.0f} | {median[1]:.0f} |")


if __name__ == "__main__":
    main()
