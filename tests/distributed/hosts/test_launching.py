"""Every way to start a run on two hosts trains, saves and resumes what one process trains."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import host_runs
from tests.support.exhaustive import some
from tests.support.host_runs import PORT, RUN
from tests.support.hosts import Hosts, Network, open_hosts
from tests.support.parity import one_process, TOLERANCE

LAYOUT: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
NETWORKS = [Network(ipv4="10.1.0", leads_somewhere=False), Network(ipv4="10.2.0")]


def plainly(hosts: Hosts, words: list[str]) -> None:
    """The script itself, once on each host; it starts the process of the second device."""
    for node, host in enumerate(hosts):
        variables = {"NODE_RANK": node, "MASTER_ADDR": hosts[0].name, "MASTER_PORT": PORT}
        host.run([sys.executable, *words], **variables)


def with_torchrun(hosts: Hosts, words: list[str]) -> None:
    """One agent on each host, which find each other by a c10d rendezvous."""
    meet = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{hosts[0].name}:{PORT}",
        "--rdzv-id",
        "1",
    ]
    for host in hosts:
        agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meet]
        host.run([sys.executable, *agent, *words])


WAYS: dict[str, Callable[[Hosts, list[str]], None]] = {
    "plain script": plainly,
    "torchrun": with_torchrun,
}


@pytest.mark.parametrize("way", some(WAYS, ["plain script"]))
def test_launcher_trains_saves_and_resumes_on_two_hosts(way: str, tmp_path: Path) -> None:
    with open_hosts(2, tmp_path, NETWORKS) as hosts:
        words = [str(Path(host_runs.__file__)), str(tmp_path), json.dumps(LAYOUT), "2", "2"]
        WAYS[way](hosts, words)
        assert hosts.wait(150) == [0, 0], hosts.texts()
        # torchrun keeps a folder with what its processes said.
        left = [what for host in hosts for what in host.left() if "/torchelastic_" not in what]
        assert left == []
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(4)]
    assert {name for name, _ in found[:2]} != {name for name, _ in found[2:]}
    assert len({name for name, _ in found[:2]}) == len({name for name, _ in found[2:]}) == 1
    run = {**RUN, "trainer": {"max_epochs": 2}}
    wanted = one_process(repr(run))["weights"]
    for name, weight in wanted.items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=0, atol=TOLERANCE)
