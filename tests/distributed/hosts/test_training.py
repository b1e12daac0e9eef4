"""Training on several hosts gives what one process gives, whichever interface leads there."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.host_runs import assert_layouts, start_ranks, train_layouts
from tests.support.hosts import delay_refusal, Network, open_hosts

NOWHERE, LEADING = Network(ipv4="10.1.0", leads_somewhere=False), Network(ipv4="10.2.0")
INSIDE = {"tensor_parallel_size": 2}
LAYOUTS: list[dict[str, Any]] = [
    {**INSIDE, "pipeline_parallel_size": 2, "data_parallel_size": 1},
    {**INSIDE, "pipeline_parallel_size": 1, "data_parallel_size": 2, "zero_stage": 3},
    {**INSIDE, "pipeline_parallel_size": 1, "context_parallel_size": 2, "data_parallel_size": 1},
]


def test_two_hosts_whose_first_interface_leads_nowhere_train_what_one_process_trains(
    tmp_path: Path,
) -> None:
    with open_hosts(2, tmp_path, [NOWHERE, LEADING]) as hosts:
        start_ranks(hosts, 2, train_layouts, tmp_path, LAYOUTS, 2, 2)
        assert hosts.wait(150) == [0] * 4, hosts.texts()
        assert_layouts(tmp_path, LAYOUTS, ["host0", "host0", "host1", "host1"])


FOUR: list[dict[str, Any]] = [
    {**INSIDE, "pipeline_parallel_size": 4, "data_parallel_size": 1},
    {**INSIDE, "pipeline_parallel_size": 2, "data_parallel_size": 2},
    {**INSIDE, "pipeline_parallel_size": 1, "data_parallel_size": 4, "zero_stage": 3},
    {**INSIDE, "pipeline_parallel_size": 1, "context_parallel_size": 4, "data_parallel_size": 1},
]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_four_hosts_train_what_one_process_trains(tmp_path: Path) -> None:
    with open_hosts(4, tmp_path) as hosts:
        start_ranks(hosts, 2, train_layouts, tmp_path, FOUR, 2, 4)
        assert hosts.wait(500) == [0] * 8, hosts.texts()
        assert_layouts(tmp_path, FOUR, [f"host{rank // 2}" for rank in range(8)])


@pytest.mark.exhaustive
@pytest.mark.skipif(delay_refusal() is not None, reason=delay_refusal() or "")
def test_link_that_delays_and_loses_packets_changes_no_number(tmp_path: Path) -> None:
    with open_hosts(2, tmp_path, [Network(delay=0.001)]) as hosts:
        hosts[1].lose(0.01)
        start_ranks(hosts, 2, train_layouts, tmp_path, LAYOUTS[:2], 2, 2)
        assert hosts.wait(150) == [0] * 4, hosts.texts()
        assert_layouts(tmp_path, LAYOUTS[:2], ["host0", "host0", "host1", "host1"])


def test_hosts_train_over_ipv6_alone(tmp_path: Path) -> None:
    with open_hosts(2, tmp_path, [Network(ipv4=None, ipv6="fd77")]) as hosts:
        layouts = [{"tensor_parallel_size": 1, "pipeline_parallel_size": 2}]
        address = hosts[0].address(version=6)
        start_ranks(hosts, 1, train_layouts, tmp_path, layouts, 1, 2, MASTER_ADDR=address)
        assert hosts.wait(150) == [0] * 2, hosts.texts()
        assert_layouts(tmp_path, layouts, ["host0", "host1"])
