"""Step time on two hosts: what is best divided across the link between them?

    python benchmarks/hosts_step_time.py [--gigabits 1] [--milliseconds 1] [--turns 5]

Two hosts of two ranks, namespaces of this machine (which needs root), on two networks: one without
limits, and one that lets so much through (tbf) and takes so long one way (tests/support/cable.c).
The same GPT, of 3.2 million parameters, 8 x 256 tokens a step, float32. Layouts and networks take
turns, five steps each, in one run of ranks. Where other work takes the cores now and then, the
fastest step tells most.
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


def measure(out: Path, turns: int, addresses: list[str]) -> None:
    """Train every layout on every network in turn; rank 0 leaves the seconds of a step in a file.

    Args:
        out: Folder of the file.
        turns: How often each is trained.
        addresses: Of the first host on each network.
    """
    ids = torch.randint(256, (100, TOKENS), generator=torch.Generator().manual_seed(3))
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in addresses] for name in LAYOUTS}
    for _ in range(turns):
        for name, layout in LAYOUTS.items():
            for found, address in zip(seconds[name], addresses, strict=True):
                os.environ["MASTER_ADDR"] = address  # gloo takes the interface that leads there
                found += _step_times(layout, ids, 2 if "dp 2" in name else 1)
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
    networks = [Network(), Network(ipv4="10.78.0", delay=chosen.milliseconds / 1000)]
    with tempfile.TemporaryDirectory() as folder, open_hosts(2, Path(folder), networks) as hosts:
        hosts[1].limit(round(chosen.gigabits * 1e9), network=1)
        addresses = [hosts[0].address(network) for network in (0, 1)]
        start_ranks(hosts, 2, measure, Path(folder), chosen.turns, addresses)
        if hosts.wait(3600) != [0] * 4:
            sys.exit(hosts.texts())
        seconds = torch.load(Path(folder) / "seconds.pt")
    print("| layout | fastest step, ms | slow link | more | median, ms | slow link |")
    for name, of_networks in seconds.items():
        fastest = [1e3 * min(found) for found in of_networks]
        median = [1e3 * statistics.median(found) for found in of_networks]
        row = f"{fastest[0]:.0f} | {fastest[1]:.0f} | {fastest[1] - fastest[0]:.0f}"
        print(f"| {name} | {row} | {median[0]:.0f} | {median[1]:.0f} |")


if __name__ == "__main__":
    main()
