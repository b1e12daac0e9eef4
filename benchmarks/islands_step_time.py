"""Step time and bytes of islands, beside replicas that send their gradients in every step.

What islands gain needs a slow network, such as a network namespace of its own (``unshare -n``) in
which ``tc qdisc add dev lo root tbf rate 200mbit burst 256kb latency 50ms`` was run after ``ip link
set lo up``. All that replicas, or islands and their server, say to each other goes through it.
Contenders take turns, each in new processes; a time is that of whole rounds, over their steps.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from _gpt import BenchModule, loader
from _learn import quiet
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_par import Hybrid3DStrategy, Outer
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.profiling.comm_volume import CommVolume

BATCH, KEY = 4, "a key of the benchmark only"
ONES: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "zero_stage": 0,
    "verify": False,
}
ISLANDS: dict[str, dict[str, Any]] = {
    "islands, float32": {"quantize": "none"},
    "islands, int8": {"quantize": "int8"},
    "islands, int8, 4 fragments, overlap 4": {"quantize": "int8", "fragments": 4, "overlap": 4},
}
REPLICAS: dict[str, Any] = {"in step": None, "in step, int8": "int8"}
"""What is compared: options of `Outer`, and methods of gradient compression."""


class Clock(Callback):
    """Times `steps` steps after `warmup` steps, and counts the bytes that this rank sent."""

    def __init__(self, warmup: int, steps: int, volume: CommVolume) -> None:
        self.warmup, self.end, self.volume = warmup, warmup + steps, volume
        self.marks: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note the time and the bytes at both ends."""
        if trainer.global_step not in (self.warmup, self.end):
            return
        rounds = trainer.strategy.islands
        if rounds is not None:
            sent = rounds.client.sent, rounds.client.received
        else:
            sent = (self.volume.total().sent,) * 2
        self.marks.append((time.monotonic(), *sent))


def make_strategy(name: str, count: int, every: int, **outer: Any) -> tuple[Hybrid3DStrategy, int]:
    """Return the strategy of a contender, and the devices of each process's Trainer."""
    if name in ISLANDS:
        fields = {**ISLANDS[name], "every": every, "min_islands": count, **outer}
        return Hybrid3DStrategy(**ONES, outer=Outer(**fields)), 1
    return Hybrid3DStrategy(**ONES, gradient_compression=REPLICAS[name]), count


def work(name: str, count: int, every: int) -> None:
    """Run on one rank, and print what was measured."""
    quiet()
    strategy, devices = make_strategy(name, count, every)
    warmup, steps = (every, every) if name in ISLANDS else (2, 6)
    with CommVolume() as volume:
        clock = Clock(warmup, steps, volume)
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_steps=clock.end + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
        )
        trainer.fit(BenchModule(), loader(BATCH))
    (start, *before), (end, *after) = clock.marks
    bytes_each = [(b - a) / steps for a, b in zip(before, after, strict=True)]
    print(json.dumps([(end - start) / steps, *bytes_each]), flush=True)


def launch(name: str, count: int, words: list[str]) -> list[Any]:
    """Run a script's workers, as replicas or as islands; return what each printed last."""
    server = IslandServer("127.0.0.1", 0, KEY.encode()) if name in ISLANDS else None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = []
    for rank in range(count):
        told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if server is not None:
            told["LIGHTNING_PAR_SERVER"] = f"127.0.0.1:{server.port}"
            told |= {"LIGHTNING_PAR_ISLAND": f"{rank}/{count}", "LIGHTNING_PAR_KEY": KEY}
        else:
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
            told |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            told |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}
        command = [sys.executable, *words]
        workers.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **told})
        )
    said = [worker.communicate()[0] for worker in workers]
    if server is not None:
        server.close()
    return [json.loads(text.splitlines()[-1]) for text in said]


def run(name: str, count: int, every: int) -> list[float]:
    """Return seconds, bytes sent and bytes received a step of the slowest process."""
    words = [__file__, "--work", name, "--count", str(count), "--every", str(every)]
    return max(launch(name, count, words))


def main() -> None:
    """Measure, and print medians with quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="of every contender")
    parser.add_argument("--leave-out", nargs="*", default=[], help="contenders")
    parser.add_argument("--count", type=int, default=2, help="replicas, or islands")
    parser.add_argument("--every", type=int, default=30, help="steps from exchange to exchange")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.count, options.every)
        return
    torch.set_num_threads(1)
    names = [name for name in (*REPLICAS, *ISLANDS) if name not in options.leave_out]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name in names:
            found[name].append(run(name, options.count, options.every))
            print(name, found[name][-1], file=sys.stderr)
    first = [times[0] for times in found["in step"]]
    for name, turns in found.items():
        times = [turn[0] for turn in turns]
        ratios = sorted(t / f for t, f in zip(times, first, strict=True))
        low, middle, high = ratios[0], ratios[0], ratios[0]
        if len(ratios) > 1:
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        sent, received = (turns[0][i] / 2**20 for i in (1, 2))
        print(
            f"{name:<40}{statistics.median(times) * 1000:8.1f} ms  {middle:.3f} "
            f"({low:.3f}..{high:.3f})  {sent:.3f} MiB sent, {received:.3f} received a step"
        )


if __name__ == "__main__":
    main()
