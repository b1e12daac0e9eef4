"""The rendezvous on the loopback: all ranks come, or the missing ones are named."""

import atexit
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_par.errors import MeshError
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes import mesh_processes
from lightning_par.strategies.processes.interruption import Interruption
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.processes.rendezvous import leave_at_exit, loopback_store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_every_rank_gets_the_store() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda rank: loopback_store(port, rank, 3), range(3)))
    stores[2].set("seen", "by all")
    assert [store.get("seen") for store in stores] == [b"by all"] * 3


@pytest.mark.parametrize(("rank", "named"), [(0, "rank 1, 2 did not come"), (1, "rank 0 did not")])
def test_missing_ranks_are_named(rank: int, named: str) -> None:
    with pytest.raises(MeshError, match=named):
        loopback_store(free_port(), rank, 3, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("device", "backend", "leaves"),
    [("cuda", None, True), ("cuda", "gloo", False), ("cuda", "nccl", True), ("cpu", None, False)],
)
def test_a_process_leaves_groups_of_nccl_at_its_end(
    device: str, backend: str | None, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning sees to a backend of the name "nccl"; ours has another, with gloo for the host."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    monkeypatch.setattr(mesh_processes, "init_process_group", lambda *_, **__: None)
    processes = MeshProcesses(MeshOptions(process_group_backend=backend))
    environment = SimpleNamespace(world_size=lambda: 2, local_rank=lambda: 0)
    processes._environment = cast(Any, environment)
    processes._devices = [torch.device(device, index) for index in range(2)]
    processes._rendezvous()
    processes.close()
    assert len(asked) == leaves


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_whose_run_failed_waits_for_nobody_at_its_end(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[], None]] = []
    left: list[bool] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    interruption = Interruption(None)
    interruption.module = cast(
        Any, SimpleNamespace(_trainer=SimpleNamespace(interrupted=interrupted))
    )
    leave_at_exit(interruption)
    asked[0]()
    assert bool(left) == (not interrupted)
