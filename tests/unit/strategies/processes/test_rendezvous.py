"""The rendezvous on the loopback: all ranks come, or the missing ones are named."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lightning_par.errors import MeshError
from lightning_par.strategies.processes.rendezvous import loopback_store


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
