"""The interface that leads to another host is that of the kernel's route, unless the user says."""

import os
import socket

import pytest

from lightning_par.strategies.processes.interface import (
    find_route,
    GLOO,
    is_loopback,
    name_interface,
    NCCL,
)


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_route_to_this_host_is_the_loopback(target: str) -> None:
    route = find_route(target)
    assert route is not None
    assert is_loopback(route.address)
    assert route.interface in ("lo", "lo0")


def test_interface_has_the_address_of_the_route() -> None:
    route = find_route("192.0.2.77")  # for documentation; nothing is sent
    if route is None or route.interface is None:
        pytest.skip("this machine has no route to the outside")
    assert route.interface in [name for _, name in socket.if_nameindex()]
    own = find_route(route.address)
    assert own == route, "the own address is at its interface, and not at the loopback"


def test_unknown_name_raises() -> None:
    with pytest.raises(OSError, match=r".+"):
        find_route("no such host")


def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "chosen")
    monkeypatch.setenv(NCCL, "")
    del os.environ[NCCL]
    assert name_interface("eth7", GLOO, NCCL) == [NCCL]
    assert (os.environ[GLOO], os.environ[NCCL]) == ("chosen", "=eth7")
