"""Thousands of messages that nobody should take, sent to a server that serves an island."""

import copy
import gc
import logging
import operator
import random
import re
import socket
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.engine.data.islands.channel import Channel
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.regions import Hello, Region
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.errors import IslandError
from tests.support.exhaustive import some
from tests.support.islands import Island, KEY, serving, SHAPES
from tests.unit.engine.islands.test_channel import Tap

OUTER = Outer(every=1, optimizer="average", quantize="none", grace=0, timeout=60.0)
START = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
ENTRIES = sum(value.numel() for value in START.values())


def hello() -> dict[str, Any]:
    """Of an island beside the one that trains."""
    regions = [
        Region(
            name=name,
            offset=(0,) * len(shape),
            size=shape,
            shape=shape,
            dtype="float64",
            sends=True,
            trains=True,
        )
        for name, shape in SHAPES.items()
    ]
    agreed: dict[str, Any] = {"outer": OUTER.agreement(), "regions": regions}
    return Hello(island=1, rank=0, world=1, incarnation="first", **agreed).header()


class Caller:
    """Connections to a server, of a caller who does not mean well.

    Args:
        server: The server.
        seed: Of what is sent.
    """

    def __init__(self, server: IslandServer, seed: int) -> None:
        self.server, self.draw = server, random.Random(seed)
        self.record = self._move(1.0)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)

    def _end(self, connection: socket.socket, more: bytes = b"") -> None:
        """Send what is left, and wait until the server has closed the connection."""
        with connection, suppress(OSError):  # that it has closed is said in several ways
            connection.sendall(more)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def _greet(self) -> tuple[Channel, Any]:
        tap: Any = Tap(self._connect())
        channel = Channel(tap, KEY, is_server=False, timeout=60)
        channel.send(hello())
        assert channel.receive(16 * ENTRIES)[0]["op"] == "welcome"
        return channel, tap

    def _move(self, part: float) -> bytes:
        """Send a part of a movement with the key; return all that was sent."""
        channel, tap = self._greet()
        low = len(tap.written)
        tap.change = lambda _: b""
        header = {"op": "move", "fragment": 0, "ticket": "t", "base": ["", 0], "samples": 1}
        channel.send({**header, "step": 1, "pace": 1}, bytes(8 * ENTRIES))
        cut = low + int(part * (len(tap.written) - low))
        self._end(tap.inner, bytes(tap.written[low:cut]))
        return bytes(tap.written)

    def send_garbage(self) -> None:
        """Bytes of no meaning."""
        start = self.draw.choice([b"", b"LPI1", b"GET / HTTP/1.1\r\n\r\n"])
        self._end(self._connect(), start + self.draw.randbytes(self.draw.randrange(400)))

    def send_truncated(self) -> None:
        """A movement that ends too early."""
        self._move(self.draw.random())

    def send_replayed(self) -> None:
        """What another connection has sent, or what this one has sent already."""
        if self.draw.random() < 0.5:
            self._end(self._connect(), self.record)
            return
        _, tap = self._greet()
        self._end(tap.inner, bytes(tap.written[64:]))

    def send_unauthenticated(self) -> None:
        """A movement with a proof that was guessed."""
        self._end(self._connect(), self.draw.randbytes(64) + self.record[64:])

    def send_all(self, count: int) -> None:
        """Send so many of each."""
        kinds = self.send_garbage, self.send_truncated, self.send_replayed
        for send in (*kinds, self.send_unauthenticated):
            for _ in range(count):
                send()


@pytest.fixture
def server() -> Iterator[IslandServer]:
    with serving() as found:
        yield found


def held_by(server: IslandServer, threads: set[threading.Thread]) -> list[int]:
    """Return the open files, the threads and the bytes of this process, once no others run."""
    while not threads.issuperset(threading.enumerate()):
        time.sleep(0.01)
    gc.collect()
    files = len(list(Path("/dev/fd").iterdir())), len(server._open), len(server._threads)
    return [*files, len(server.meeting._members), tracemalloc.get_traced_memory()[0]]


@pytest.mark.parametrize("count", some([50, 1000], large=[1000]))
def test_strangers_change_nothing_and_leave_nothing(
    count: int, server: IslandServer, caplog: pytest.LogCaptureFixture
) -> None:
    island = Island(server.port, 0, OUTER, START)
    island.join()
    threads = set(threading.enumerate())  # a caller that was refused may still have one
    caller = Caller(server, seed=count)
    weights = server.meeting.weights
    assert weights is not None
    with caplog.at_level(logging.WARNING):
        caller.send_all(5)
        before = copy.deepcopy(vars(weights.fragments[0]))
        tracemalloc.start()
        first = held_by(server, threads)
        caller.send_all(count)
        last = held_by(server, threads)
        tracemalloc.stop()
        assert vars(weights.fragments[0]) == before
        assert all(torch.equal(value, START[name]) for name, value in weights.exact.items())
        island.step(lambda name: torch.ones(SHAPES[name], dtype=torch.float64))
        assert island.ranks[0].exchanges[-1].islands == [0]
        island.close()
        server.close()
    assert all(map(operator.le, last[:-1], first[:-1]))
    assert last[-1] - first[-1] < 1e6
    assert all(torch.equal(value, START[name] - 1) for name, value in weights.exact.items())
    said = [record.message for record in caplog.records]
    more = [int(n) for s in said for n in re.findall(r"^(\d+) more connections were refused", s)]
    # And the connection that was recorded, which left without a word.
    assert len(said) - len(more) + sum(more) == 4 * (5 + count) + 1
    assert max(map(len, said)) <= 500
    assert more


def test_a_connection_that_cannot_be_encrypted_is_closed(tmp_path: Path) -> None:
    """As its certificates are gone."""
    outer = Outer(every=1, timeout=0.5, ca_file=str(tmp_path / "gone.pem"))
    with warnings.catch_warnings(record=True) as caught, serving() as server:
        warnings.simplefilter("always", ResourceWarning)
        island = Island(server.port, 0, outer, START)
        with pytest.raises(IslandError, match="could not reach its server"):
            island.join()
        island.close(finished=False)
        del island
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
