"""Nothing of a run listens on a network that the run does not need."""

import time
from pathlib import Path

from tests.support.faults.hosts import train_long
from tests.support.host_runs import start_ranks
from tests.support.hosts import Network, open_hosts


def test_ranks_listen_at_the_address_over_which_hosts_talk_and_nowhere_else(tmp_path: Path) -> None:
    with open_hosts(2, tmp_path, [Network(), Network(ipv4="10.78.0")]) as hosts:
        start_ranks(hosts, 1, train_long, 60.0, 1, 2, MASTER_ADDR=hosts[0].address(1))
        deadline = time.monotonic() + 150
        while not all("begins step 3" in host.tasks[0].text() for host in hosts):
            assert time.monotonic() < deadline, hosts.texts()
            time.sleep(0.01)
        for host in hosts:
            listening = host.anchor.call("ss -Hltnu").splitlines()
            where = {line.split()[-2].rpartition(":")[0] for line in listening}
            assert where == {host.address(1)}, (listening, hosts.texts())
