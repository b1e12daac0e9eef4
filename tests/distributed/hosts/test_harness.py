"""The hosts of the tests are hosts: they see each other only over networks that can be damaged."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import delay_refusal, Host, Hosts, Network, open_hosts, Task

COUNT = 200
LISTEN = """
import socket
said = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
said.setsockopt(socket.SOL_SOCKET, 33, 1 << 25)  # SO_RCVBUFFORCE: it is not to lose any itself
said.bind(("", 5000))
print("listens on", socket.gethostname(), flush=True)
count = 0
while True:
    try:
        data, sender = said.recvfrom(2000)
    except TimeoutError:  # what was late has come, too
        print(f"got {count}", flush=True)
        count = 0
        said.settimeout(None)
        continue
    if data == b"end":
        said.settimeout(0.3)
    count += len(data) == 1000
    if data == b"back":
        said.sendto(data, sender)
"""
PING = """
import socket, sys, time
to = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(20):
    began = time.monotonic()
    to.sendto(b"back", (sys.argv[1], 5000))
    to.recv(100)
    print(time.monotonic() - began)
"""
SEND = """
import socket, sys, time
to = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[3])):
    to.sendto(bytes(1000), (sys.argv[1], 5000))
    time.sleep(0.0001)
to.sendto(b"end", (sys.argv[2], 5000))
"""
CARRY = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print("listens", flush=True)
    connection, began = server.accept()[0], time.monotonic()
    size = sum(iter(lambda: len(connection.recv(1 << 16)), 0))
    print(size, time.monotonic() - began)
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 5001)).sendall(bytes(500_000))"
NETWORKS = [Network(), Network(ipv4="10.78.0"), Network(ipv4="10.79.0", leads_somewhere=False)]


def until(is_so: Callable[[], bool], log: Task) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, log.text()
        time.sleep(0.01)


def received(hosts: Hosts, listener: Task, network: int, count: int = COUNT) -> int:
    """How many datagrams over a network arrive; the second network ends the count."""
    before = listener.text().count("got")
    to = [hosts[0].address(network), hosts[0].address(1)]
    sender = hosts[1].run([sys.executable, "-c", SEND, *to, count])
    until(lambda: listener.text().count("got") > before, listener)
    until(lambda: sender.code is not None, sender)
    return int(listener.text().split()[-1])


def carry(hosts: Hosts, network: int) -> float:
    """Seconds that 500 kB over a connection take."""
    python, to = [sys.executable, "-c"], hosts[0].address(network)
    carrier = hosts[0].run([*python, CARRY, to])
    until(lambda: "listens" in carrier.text(), carrier)
    hosts[1].run([*python, CALL, to])
    until(lambda: carrier.code is not None, carrier)
    size, seconds = carrier.text().split()[1:]
    assert int(size) == 500_000
    return float(seconds)


def test_networks_are_separate_and_can_be_cut_joined_slowed_and_made_to_lose(
    tmp_path: Path,
) -> None:
    with open_hosts(2, tmp_path, NETWORKS) as hosts:
        first: Host = hosts[0]
        listener = first.run([sys.executable, "-c", LISTEN])
        until(lambda: "listens on host0" in listener.text(), listener)
        assert received(hosts, listener, 0) == COUNT
        assert received(hosts, listener, 2) == 0  # leads nowhere
        before = hosts[1].bytes_sent()
        hosts[1].cut()
        assert received(hosts, listener, 0) == 0
        assert hosts[1].bytes_sent() - before >= COUNT * 1000  # it has seen nothing of the cut
        hosts[1].join()
        assert received(hosts, listener, 0) == COUNT
        hosts[1].lose(0.2)
        assert 0.6 * COUNT < received(hosts, listener, 0) < 0.95 * COUNT
        hosts[1].limit(4_000_000, network=1)
        assert carry(hosts, 1) > 0.8  # 500 kB less a burst of 64 kB at 500 kB/s
        assert [what.split()[0] for what in first.left(seconds=0)] == ["process"]
        first.signal(signal.SIGSTOP)
        assert listener.code is None
        held = [*first.processes(), first.anchor.pid, hosts[1].anchor.pid, first.switch.pid]
    assert not [pid for pid in held if Path(f"/proc/{pid}").exists()]
    assert listener.code != 0


def shortest_round_trip(hosts: Hosts, network: int) -> float:
    """Seconds from one host to the other and back."""
    ping = hosts[1].run([sys.executable, "-c", PING, hosts[0].address(network)])
    until(lambda: ping.code is not None, ping)
    return min(float(line) for line in ping.text().splitlines())


def frames_sent(host: Host) -> int:
    """How many frames its first interface has sent, each of which may be one of 64 KiB."""
    said = json.loads(host.anchor.call("ip -j -s link show dev eth0"))
    return int(said[0]["stats64"]["tx"]["packets"])


@pytest.mark.skipif(delay_refusal() is not None, reason=delay_refusal() or "")
def test_networks_delay_packets_and_lose_one_in_a_hundred(tmp_path: Path) -> None:
    networks = [Network(delay=0.001), Network(ipv4="10.78.0")]
    with open_hosts(2, tmp_path, networks) as hosts:
        listener = hosts[0].run([sys.executable, "-c", LISTEN])
        until(lambda: "listens on host0" in listener.text(), listener)
        assert shortest_round_trip(hosts, 0) > 0.002 > shortest_round_trip(hosts, 1)
        assert received(hosts, listener, 0) == COUNT
        hosts[1].lose(0.01)
        lost = 4000 - received(hosts, listener, 0, 4000)
        assert 15 < lost < 80  # 40, with a standard deviation of 6.3
        before = frames_sent(hosts[1])
        carry(hosts, 0)
        assert frames_sent(hosts[1]) - before >= 500_000 // 1448  # each may be lost by itself
        hosts[1].cut()
        assert received(hosts, listener, 0) == 0
        held = [hosts[0].anchor.pid, hosts[0].switch.pid]
    assert not [pid for pid in held if Path(f"/proc/{pid}").exists()]


def test_hosts_end_with_a_failing_test_and_with_a_killed_one(tmp_path: Path) -> None:
    def fail(folder: Path, told: int, act: Callable[[], object]) -> None:
        with open_hosts(1, folder) as hosts:
            task = hosts[0].run(["sleep", "1000"])
            until(lambda: bool(hosts[0].processes()), task)
            os.write(told, f"{hosts[0].anchor.pid} {hosts[0].processes()[0]}\n".encode())
            act()

    reader, writer = os.pipe()
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "raises", writer, lambda: 1 // 0)
    child = os.fork()
    if child == 0:
        fail(tmp_path / "killed", writer, lambda: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    pids = [int(pid) for pid in os.read(reader, 1000).split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
