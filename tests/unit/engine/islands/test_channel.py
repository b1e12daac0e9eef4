"""Messages: what arrives is what was sent, and what a stranger sends is refused."""

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_par.engine.data.islands.channel import Channel, MessageError
from tests.support.exhaustive import some

KEY = b"a shared key of the tests"


class Tap:
    """A socket that keeps what is written through it, and may change it."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner, self.written, self.change = inner, bytearray(), lambda data: data

    def sendall(self, data: Any) -> None:
        self.written += data
        self.inner.sendall(self.change(bytes(data)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def both(server: Callable[[], Any], client: Callable[[], Any]) -> list[Any]:
    """Run both sides; give what each returned or raised."""
    found: list[Any] = [None, None]

    def run(at: int, call: Callable[[], Any]) -> None:
        try:
            found[at] = call()
        except OSError as error:
            found[at] = error

    thread = threading.Thread(target=run, args=(0, server))
    thread.start()
    run(1, client)
    thread.join()
    return found


def pair(their_key: bytes = KEY) -> list[Any]:
    ours, theirs = socket.socketpair()
    tap: Any = Tap(theirs)
    return [
        *both(
            lambda: Channel(ours, KEY, is_server=True, timeout=30),
            lambda: Channel(tap, their_key, is_server=False, timeout=30),
        ),
        tap,
    ]


@pytest.fixture
def linked() -> Iterator[tuple[Channel, Channel, Tap]]:
    server, client, tap = pair()
    yield server, client, tap
    server.close()
    client.close()


def test_messages_arrive_in_both_directions(linked: tuple[Channel, Channel, Tap]) -> None:
    server, client, _ = linked
    for number in range(3):
        client.send({"number": number}, bytes(range(number)))
        header, payload = server.receive(limit=10)
        assert (header, bytes(payload)) == ({"number": number}, bytes(range(number)))
        server.send({"answer": -number})
        assert client.receive() == ({"answer": -number}, b"")
    assert client.sent == server.received
    assert server.sent == client.received


def test_another_key_is_refused_on_the_server_which_tells_nothing() -> None:
    server, client, tap = pair(b"another key")
    assert isinstance(server, MessageError)
    assert "the other side has a different key" in str(server)
    assert isinstance(client, OSError)
    assert len(tap.written) == 64  # its number and its proof; there was no third message


def test_client_refuses_a_server_that_does_not_know_the_key() -> None:
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        ours.sendall(b"LPI1" + bytes(32))
        ours.recv(64)
        ours.sendall(bytes(32))

    found = both(pretend, lambda: Channel(theirs, KEY, is_server=False, timeout=30))
    assert isinstance(found[1], MessageError)
    ours.close()


def test_repeated_message_is_refused(linked: tuple[Channel, Channel, Tap]) -> None:
    server, client, tap = linked
    tap.written.clear()
    client.send({"op": "move"}, b"12345")
    assert server.receive(limit=5)[0] == {"op": "move"}
    tap.inner.sendall(bytes(tap.written))
    with pytest.raises(MessageError, match="forged or repeated"):
        server.receive(limit=5)


def test_message_of_another_connection_is_refused(linked: tuple[Channel, Channel, Tap]) -> None:
    other, sender, recorded = pair()
    recorded.written.clear()
    sender.send({"op": "move"}, b"12345")
    linked[2].inner.sendall(bytes(recorded.written))
    with pytest.raises(MessageError, match="forged"):
        linked[0].receive(limit=5)
    other.close()
    sender.close()


def test_recorded_hello_is_refused() -> None:
    server, client, tap = pair()
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes(tap.written[:64]))
    with pytest.raises(MessageError, match="the other side has a different key"):
        Channel(ours, KEY, is_server=True)
    for end in (server, client, theirs):
        end.close()


def test_too_long_a_message_is_refused_before_it_is_read(
    linked: tuple[Channel, Channel, Tap],
) -> None:
    server, client, tap = linked
    tap.change = lambda data: data if len(data) < 1000 else b""  # the payload stays away
    client.send({}, bytes(1000))
    with pytest.raises(MessageError, match=r"2 bytes and 1,000 bytes .* and 999 bytes"):
        server.receive(limit=999)


def test_header_that_is_no_object_is_refused(linked: tuple[Channel, Channel, Tap]) -> None:
    server, client, _ = linked
    client.send([1, 2])  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="not a JSON object"):
        server.receive()


def damage(data: bytes, draw: random.Random) -> bytes:
    """Change a message as a bad link or an attacker would: flip, cut, extend, or replace it."""
    kind, at = draw.randrange(4), draw.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + draw.randbytes(1 + draw.randrange(9)) + data[at:]
    return draw.randbytes(len(data))


@pytest.mark.parametrize("count", some([300, 1000], large=[1000]))
def test_damaged_message_is_never_taken(count: int) -> None:
    """Each on a connection of its own, as a refused message ends it."""
    draw = random.Random(count)
    for _ in range(count):
        server, client, tap = pair()
        tap.written.clear()
        tap.change = lambda data: b""
        client.send({"op": "move", "step": draw.randrange(99)}, draw.randbytes(draw.randrange(40)))
        tap.inner.sendall(damage(bytes(tap.written), draw))
        client.close()  # what is cut off will never come
        with pytest.raises(MessageError):
            server.receive(limit=100)
        server.close()


@pytest.mark.parametrize("count", some([300, 1000], large=[1000]))
def test_garbage_of_a_stranger_is_refused(count: int) -> None:
    draw = random.Random(count)
    for _ in range(count):
        ours, theirs = socket.socketpair()
        start = draw.choice([b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack(">IQ", 2**32 - 1, 2**63)])
        theirs.sendall(start + draw.randbytes(draw.randrange(200)))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(MessageError):
            Channel(ours, KEY, is_server=True)
        theirs.close()


def test_silence_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(TimeoutError):
        Channel(ours, KEY, is_server=True, timeout=0.05)
    theirs.close()
