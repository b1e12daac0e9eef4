"""Authenticated messages over a socket: a header in JSON, and the bytes of tensors.

    hello:    server -> "LPI1" + 32 random bytes;  client -> 32 random bytes + its proof (32 bytes)
              server -> its proof
    message:  length of the header (4 bytes) and of the payload (8), mac | header, payload, mac

A proof and a mac are HMAC-SHA256. Proofs are made with the shared key of both random numbers. Each
direction of a connection has a key of its own, derived from the same, and counts its messages; the
count is part of every mac. So a message that was forged, cut, repeated, reordered, or recorded on
another connection is refused. Lengths have a mac of their own: nothing is allocated, and nobody is
waited for, because of a number that a stranger sent. Nothing is ever unpickled. Who listens can
read, unless the connection is encrypted (TLS).

Note [Transports]: torch's TCPStore has no authentication and its values are read by polling; groups
of gloo or NCCL have fixed members, and one that is lost ends the group; gRPC and ZeroMQ would be
new dependencies with keys and certificates of their own, for one exchange of two messages; torchft
replaces torch's groups and manager, and sends pickles. Sockets, `hmac` and `ssl` of the standard
library are enough.

**Source**: Bellare, Canetti, Krawczyk (HMAC, RFC 2104).
"""

import hmac
import json
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["Answer", "Channel", "MessageError"]

Answer = tuple[dict[str, Any], bytes | memoryview]
"""Header and payload of an answer."""

_MAGIC = b"LPI1"
_LENGTHS = struct.Struct(">IQ")
_MAC = 32
_CHUNK = 1 << 20
_HEADER_LIMIT = 64 << 20
"""Bytes of the longest header: boxes of a model, at about 150 bytes each."""
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is cut off is noticed after about a minute."""


class MessageError(ConnectionError):
    """What came is no message of the other side; the connection is of no use any more."""


class Channel:
    """One connection between a rank of an island and the server, after both have proven that they
    know the key. Requests and answers alternate, so that one thread serves a side.

    Args:
        connection: A connected socket, or one of TLS; closed if the other side does not know the
            key.
        key: The shared key.
        is_server: Which side this is.
        timeout: Seconds for the proofs, all in all.

    Attributes:
        sent: Bytes sent so far.
        received: Bytes received so far.

    Raises:
        MessageError: The other side does not know the key, or is none of ours.
        OSError: The connection is lost, or silent.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, *, is_server: bool, timeout: float = 10.0
    ) -> None:
        self._socket = connection
        self.sent = self.received = 0
        # Messages of each direction, sent and received: part of every mac.
        self._counts = [0, 0]
        try:
            _keep_alive(connection)
            self._deadline: float | None = time.monotonic() + timeout
            self._greet(key, is_server=is_server)
        except BaseException:
            self.close()
            raise
        self.set_timeout(None)

    def _greet(self, key: bytes, *, is_server: bool) -> None:
        mine = secrets.token_bytes(32)
        if is_server:
            self._write(_MAGIC + mine)
            nonces = mine + bytes(self._read(32))
            # The server proves itself last: a stranger learns nothing that it could use
            # elsewhere.
            _check(
                self._read(_MAC),
                _mac(key, b"client proof", nonces),
                "the other side has a different key",
            )
            self._write(_mac(key, b"server proof", nonces))
        else:
            _check(self._read(len(_MAGIC)), _MAGIC, "this is not a server of islands")
            nonces = bytes(self._read(32)) + mine
            self._write(mine + _mac(key, b"client proof", nonces))
            try:
                proof = self._read(_MAC)
            except MessageError as error:
                raise MessageError(
                    "the other side closed the connection, as it does if the keys differ"
                ) from error
            _check(proof, _mac(key, b"server proof", nonces), "the other side has a different key")
        # One for each direction, so that a message cannot be sent back to who sent it.
        keys = [_mac(key, b"from server", nonces), _mac(key, b"from client", nonces)]
        self._keys = keys if is_server else keys[::-1]

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long all that follows may take; None: for ever."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        if seconds is None:
            self._socket.settimeout(None)

    def send(self, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
        """Send one message.

        Args:
            header: Values of JSON types.
            payload: Bytes of tensors.

        Raises:
            OSError: The connection is lost, or the time is up.
        """
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= _HEADER_LIMIT
        lengths = _LENGTHS.pack(len(text), len(payload))
        # Lengths are signed by themselves: the reader allocates by them before it can check the
        # rest.
        self._write(lengths + self._sign(0, lengths))
        self._write(text)
        self._write(payload)
        self._write(self._sign(0, text, payload))

    def receive(self, limit: int = 0) -> tuple[dict[str, Any], memoryview]:
        """Return the header and the payload of the next message.

        Args:
            limit: Bytes of the longest payload that makes sense.

        Raises:
            MessageError: It is not what the other side would send; nothing of it may be used.
            OSError: The connection is lost, or the time is up.
        """
        lengths = self._read(_LENGTHS.size)
        _check(
            self._read(_MAC),
            self._sign(1, lengths),
            "the other side sent a forged or repeated message",
        )
        header_length, length = _LENGTHS.unpack(lengths)
        # Checked although signed: the limit is what the state of the conversation allows.
        if header_length > _HEADER_LIMIT or length > limit:
            raise MessageError(
                f"the other side sent a header of {header_length:,} bytes and {length:,} bytes of "
                f"data, but at most {_HEADER_LIMIT:,} and {limit:,} bytes are allowed"
            )
        text, payload = self._read(header_length), self._read(length)
        _check(
            self._read(_MAC), self._sign(1, text, payload), "the other side sent a forged message"
        )
        try:
            header = json.loads(text)
        except ValueError as error:
            raise MessageError(f"the other side sent a header that is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise MessageError("the other side sent a header that is not a JSON object")
        return header, memoryview(payload)

    def is_quiet(self) -> bool:
        """Whether the other side is there and sends nothing, as while it waits for an answer."""
        with suppress(OSError, ValueError):
            self._socket.setblocking(False)
            try:
                self._socket.recv(1)
            except (BlockingIOError, ssl.SSLWantReadError):
                # Nothing to read is what a waiting peer has; b"" means that it closed the
                # connection.
                return True
            finally:
                self._socket.setblocking(True)
        return False

    def close(self) -> None:
        """End the connection, also for a thread that waits for it."""
        # shutdown wakes a thread that is blocked in recv, which close alone does not on Linux.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _sign(self, side: int, *parts: bytes | bytearray | memoryview) -> bytes:
        self._counts[side] += 1
        # Counted before use, on both sides alike: a message that is dropped or repeated fails.
        return _mac(self._keys[side], self._counts[side].to_bytes(8), *parts)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        # In pieces, as the time that is left is set again before each of them.
        for low in range(0, len(view), _CHUNK):
            self._set_remaining_time()
            self._socket.sendall(view[low : low + _CHUNK])
        self.sent += len(data)

    def _read(self, count: int) -> bytearray:
        data, done = bytearray(count), 0
        view = memoryview(data)
        while done < count:
            self._set_remaining_time()
            got = self._socket.recv_into(view[done : done + _CHUNK])
            if not got:
                raise MessageError(
                    f"the other side closed the connection after {done} of {count} bytes"
                )
            done += got
        self.received += count
        return data

    def _set_remaining_time(self) -> None:
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("the other side did not answer in time")
            self._socket.settimeout(remaining)


def _mac(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(part)
    return made.digest()


def _check(found: bytes | bytearray, wanted: bytes, text: str) -> None:
    # In constant time, as a comparison that stops early would tell how much was right.
    if not hmac.compare_digest(found, wanted):
        raise MessageError(text)


def _keep_alive(connection: socket.socket) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # TCP_NODELAY: header, payload and mac are small writes of one message.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
