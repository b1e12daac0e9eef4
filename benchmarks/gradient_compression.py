"""Step time, bytes and learning of whole replicas that compress their gradients.

On the loopback of one machine compression only costs; what it gains needs a slow network, such as a
network namespace of its own (``unshare -n``) in which ``tc qdisc add dev lo root tbf rate 1gbit
burst 256kb latency 50ms`` was run after ``ip link set lo up``.
"""

import argparse
from functools import partial
from typing import Any

import torch.distributed as dist
from _gpt import BenchModule, loader
from _learn import print_curves
from _paired import add_arguments, Arguments, compare, fit, launch, read_arguments, Turn

from lightning_par import Hybrid3DStrategy
from lightning_par.profiling.comm_volume import CommVolume

RANKS, BATCH = 2, 4
WHOLE: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "zero_stage": 0,
}
METHODS: dict[str, Any] = {
    "whole": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "topk, 1 %": {"method": "topk", "density": 0.01},
    "powersgd, rank 4": {"method": "powersgd", "rank": 4},
}


def strategy(chosen: Any) -> Hybrid3DStrategy:
    """Return whole replicas."""
    return Hybrid3DStrategy(**WHOLE, gradient_compression=chosen)


def body(arguments: Arguments) -> None:
    """Run on one rank."""
    sent: dict[str, float] = {}

    def train(turn: Turn, name: str) -> None:
        made = strategy(METHODS[name])
        fit(BenchModule(), loader(BATCH), made, turn, arguments, limit_val_batches=0)

    for name in METHODS:
        with CommVolume() as volume:
            train(_Alone(), name)
        sent[name] = volume.total().sent / arguments.total_steps
    contenders = {name: partial(train, name=name) for name in METHODS}
    compare(f"{RANKS} whole replicas", contenders, arguments, targets={})
    if dist.get_rank() == 0:
        for name, size in sent.items():
            print(f"{name:<18}{size / 2**20:8.3f} MiB a step, {size / sent['whole']:.3f}")


class _Alone(Turn):
    """A turn that is not measured."""

    def __init__(self) -> None:
        """There is nobody to wait for."""

    def next(self) -> None:
        """Go on."""


def curves(steps: int, arguments: Arguments) -> None:
    """Run on one rank."""
    warm = {"method": "powersgd", "rank": 4, "start_step": steps // 10}
    dense = {"method": "topk", "density": 0.1}
    methods = {**METHODS, "topk, 10 %": dense, f"powersgd from step {steps // 10}": warm}
    contenders = {name: partial(strategy, chosen) for name, chosen in methods.items()}
    print_curves(contenders, steps, batch_size=4, devices=RANKS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--learn", type=int, default=0, help="show learning curves of this length")
    options = parser.parse_args()
    job = partial(curves, options.learn) if options.learn else body
    launch(job, read_arguments(options), ranks=RANKS)
