"""A host that is asked how its ranks are answers, and how it stays silent is told apart."""

import socket
from collections.abc import Iterator

import pytest

from lightning_par.strategies.processes.host_status import (
    ask_hosts,
    Causes,
    HostStatusServer,
    OtherHost,
)


@pytest.fixture
def server() -> Iterator[HostStatusServer]:
    made = HostStatusServer("127.0.0.1")
    try:
        yield made
    finally:
        made.close()


def host(port: int, name: str = "b") -> OtherHost:
    return OtherHost(name=name, ranks=["rank 2 (pp 1)", "rank 3"], address="127.0.0.1", port=port)


def test_hosts_answer_what_their_ranks_say(server: HostStatusServer) -> None:
    server.tell = lambda: Causes(failed=["rank 2 raised KeyError"], waiting=[(3.0, "rank 3")])
    found = ask_hosts([host(server.port), host(server.port, "c")])
    assert found.failed == ["rank 2 raised KeyError"] * 2
    assert [tuple(each) for each in found.waiting] == [(3.0, "rank 3")] * 2
    assert found.silent == []


def test_host_whose_processes_ended_is_named(server: HostStatusServer) -> None:
    server.close()
    (said,) = ask_hosts([host(server.port)]).silent
    assert said.startswith("host b (rank 2 (pp 1), rank 3) answers, but its processes have ended")


def test_host_whose_processes_are_frozen_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # accepts, and nobody speaks
        (said,) = ask_hosts([host(frozen.getsockname()[1])]).silent
    assert "answers at 127.0.0.1, but its processes do not: they are frozen" in said


def test_nobody_is_asked_where_there_is_one_host() -> None:
    assert ask_hosts([]) == Causes()
