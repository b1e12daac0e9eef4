"""Runs on several hosts: what every rank trains, and how they are started."""

import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_par.strategies.processes.interface import GLOO, NCCL
from tests.support.hosts import Hosts
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import assert_results, one_process, quiet_trainer, train

__all__ = [
    "PORT",
    "assert_layouts",
    "place",
    "start_ranks",
    "train_and_resume",
    "train_layouts",
]

PORT = 29400
"""Free on every host: its network is its own."""
RUN: dict[str, Any] = {"batch_size": 4, "ignored": True}


def _run_of(replicas: int) -> dict[str, Any]:
    """Arguments of `train` on one process: as many samples as the replicas can share evenly."""
    return {**RUN, "size": -(-10 // replicas) * replicas}


def place(hosts: Hosts, node: int, local: int) -> dict[str, Any]:
    """Variables of a rank that somebody starts by hand, one for each device."""
    rank = {"NODE_RANK": node, "LOCAL_RANK": local}
    return {**rank, "MASTER_ADDR": hosts[0].name, "MASTER_PORT": PORT}


def start_ranks(hosts: Hosts, local: int, function: Any, *arguments: Any, **more: Any) -> None:
    """Start `local` ranks on every host."""
    for node, host in enumerate(hosts):
        for number in range(local):
            host.fork(function, *arguments, **{**place(hosts, node, number), **more})


def train_layouts(out: Path, layouts: Sequence[dict[str, Any]], devices: int, nodes: int) -> None:
    """Train several layouts, one after the other, and leave what came out in a file."""
    import lightning_par

    found = []
    for layout in layouts:
        strategy = lightning_par.Hybrid3DStrategy(**layout)
        replicas = layout.get("data_parallel_size", 1)
        run = {**_run_of(replicas), "batch_size": RUN["batch_size"] // replicas}
        found.append(train(strategy, devices=devices, trainer={"num_nodes": nodes}, **run))
        rank = strategy.processes.rank
        assert not {GLOO, NCCL} & set(os.environ)
    torch.save([socket.gethostname(), found], out / f"{rank}.pt")


def assert_layouts(out: Path, layouts: Sequence[dict[str, Any]], hosts: Sequence[str]) -> None:
    """Assert parity of what `train_layouts` left, and on which host every rank was."""
    found = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(len(hosts))]
    assert [name for name, _ in found] == list(hosts)
    for number, layout in enumerate(layouts):
        replicas = layout.get("data_parallel_size", 1)
        wanted = one_process(repr(_run_of(replicas)))
        assert_results([r[number] for _, r in found], wanted)


def train_and_resume(out: Path, layout: dict[str, Any], devices: int, nodes: int) -> None:
    """Train an epoch, save, and let another Trainer go on; leave its weights in a file."""
    import lightning_par

    torch.set_default_dtype(torch.float64)
    samples = loader(ToyData(10, RUN["ignored"]), RUN["batch_size"])
    weights: dict[str, Any] = {}
    for epochs, start in ((1, None), (2, out / "one.ckpt")):
        strategy = lightning_par.Hybrid3DStrategy(**layout)
        place = {"devices": devices, "num_nodes": nodes, "precision": "64-true"}
        trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, **place)
        trainer.fit(ToyModule(), samples, ckpt_path=start)
        if start is None:
            trainer.save_checkpoint(out / "one.ckpt")
        else:
            weights = strategy.gather_state_dict()
    torch.save([socket.gethostname(), weights], out / f"{trainer.global_rank}.pt")


if __name__ == "__main__":  # as a user's script, which its launcher may start once for each device
    gc.freeze()  # what is imported stays; the end is a second quicker
    train_and_resume(Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:5]))
