"""Tensor-parallel ranks share a host, whatever the numbers of the scheduler, or are refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_runs import assert_layouts, place, PORT, train_layouts
from tests.support.hosts import Hosts, open_hosts

LAYOUT: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def dealt_by_slurm(hosts: Hosts, node: int, local: int) -> dict[str, Any]:
    """Variables of a task where tasks are dealt to the nodes in turn (``srun -m cyclic``)."""
    shared = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 4}
    shared |= {"SLURM_NTASKS_PER_NODE": 2, "SLURM_NODELIST": "host[0-1]", "MASTER_PORT": PORT}
    task = {"SLURM_PROCID": 2 * local + node, "SLURM_LOCALID": local, "SLURM_NODEID": node}
    return {**shared, **task, "MASTER_ADDR": hosts[0].name}


def test_ranks_dealt_to_the_hosts_in_turn_are_numbered_host_by_host(tmp_path: Path) -> None:
    with open_hosts(2, tmp_path) as hosts:
        for node, local in itertools.product(range(2), range(2)):
            variables = dealt_by_slurm(hosts, node, local)
            hosts[node].fork(train_layouts, tmp_path, [LAYOUT], 2, 2, **variables)
        assert hosts.wait(150) == [0] * 4, hosts.texts()
        assert_layouts(tmp_path, [LAYOUT], ["host0", "host0", "host1", "host1"])


@pytest.mark.parametrize("allowed", [False, True])
def test_tensor_parallel_group_across_hosts_is_refused_unless_asked_for(
    allowed: bool, tmp_path: Path
) -> None:
    with open_hosts(2, tmp_path) as hosts:
        layout = {**LAYOUT, "tensor_parallel_across_hosts": allowed}
        for node, local in itertools.product(range(2), range(2)):
            # As by a launcher that takes its two nodes for something else than the two hosts.
            variables = place(hosts, node, local)
            hosts[local].fork(train_layouts, tmp_path, [layout], 2, 2, **variables)
        codes = hosts.wait(150)
        if allowed:
            assert codes == [0] * 4, hosts.texts()
            assert_layouts(tmp_path, [layout], ["host0", "host1", "host0", "host1"])
            return
        assert codes == [1] * 4, hosts.texts()
        for task in (task for host in hosts for task in host.tasks):
            assert "rank 0 on host host0 and rank 1 on host host1; rank 2 on" in task.text()
            assert "pass tensor_parallel_across_hosts=True." in task.text()
        assert [host.left() for host in hosts] == [[], []]
