"""The server of islands: one thread for each connected rank, which asks and is answered in turn."""

import logging
import socket
import ssl
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

from lightning_par.engine.data.islands.channel import Answer, Channel, MessageError
from lightning_par.engine.data.islands.meeting import Meeting, Member, RefusalError
from lightning_par.engine.data.islands.regions import Hello

__all__ = ["IslandServer"]

_log = logging.getLogger(__name__)

_STRANGERS = 64
"""Connections at a time that have not proven yet that they know the key."""
_PATIENCE = 10.0
"""Seconds within which they have to."""
_LOOK = 0.5
"""Seconds between two looks whether a rank that waits is still there."""
_LINES, _LONGEST_LINE = 100, 500
"""Refusals that are logged in a minute, and characters of each: the disk is not a stranger's."""


class _RefusalLog:
    """Logs who was refused and why, and how many more were refused than there are lines for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began, self._count = time.monotonic(), 0

    def add(self, who: str, error: Exception) -> None:
        # Threads of many connections log.
        with self._lock:
            if time.monotonic() - self._began > 60:
                self.end_minute()
            self._count += 1
            if self._count <= _LINES:
                _log.warning("%s", f"{who}: {error}"[:_LONGEST_LINE])

    def end_minute(self) -> None:
        if self._count > _LINES:
            _log.warning(
                "%d more connections were refused in this minute; the log has no lines for them",
                self._count - _LINES,
            )
        self._began, self._count = time.monotonic(), 0


class IslandServer:
    """Listens for the ranks of islands, from its construction until `close`.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any that is free.
        key: The shared key.
        state: See `Meeting`.
        tls: Context that encrypts the connections; None: they are authenticated only.

    Attributes:
        port: The port.
        meeting: Holds the weights.

    Raises:
        OSError: The address is not free.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        *,
        state: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.meeting = Meeting(state)
        self._key, self._tls = key, tls
        self._closing = threading.Event()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._refusals = _RefusalLog()
        self._listener = socket.create_server((host, port))
        # accept() has no other way to be ended.
        self._listener.settimeout(_LOOK)  # so that it sees that it is closing
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections and threads; what was merged is saved already."""
        self._closing.set()
        self._acceptor.join()
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends what its thread waits for
        for thread in list(self._threads):
            thread.join()
        self._refusals.end_minute()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:  # nobody came, or they left at once
                continue
            # A stranger holds a thread for some seconds: their number is limited.
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            peer = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._serve, args=(connection, peer), daemon=True)
            self._threads.add(thread)
            self._open.add(connection)
            thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        member = None
        try:
            try:
                connection = self._encrypt(connection)
                channel = Channel(connection, self._key, is_server=True, timeout=_PATIENCE)
            # Proven or refused: it is no stranger any more.
            finally:
                self._strangers.release()
            member = self._introduce(channel)
            self._converse(channel, member)
        except (MessageError, RefusalError) as error:
            who = peer if member is None else str(member)
            if not self._closing.is_set():
                self._refusals.add(who, error)
        except OSError as error:
            _log.info("%s: %s", peer if member is None else member, error)
        # In this order: `leave` may answer others, who are not to wait for this socket.
        finally:
            if member is not None:
                self.meeting.leave(member)
            self._open.discard(connection)
            connection.close()
            self._threads.discard(threading.current_thread())

    def _encrypt(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        connection.settimeout(_PATIENCE)
        encrypted = self._tls.wrap_socket(connection, server_side=True)
        # `close` shuts down what is in the set, and TLS has made another object.
        self._open.discard(connection)
        self._open.add(encrypted)
        return encrypted

    def _introduce(self, channel: Channel) -> Member:
        channel.set_timeout(_PATIENCE)
        hello = Hello.read(channel.receive()[0])
        channel.set_timeout(None)
        try:
            return self.meeting.enter(hello)
        except RefusalError as error:
            channel.send({"op": "refused", "reason": str(error)})
            raise

    def _converse(self, channel: Channel, member: Member) -> None:
        while True:
            try:
                answer = self._wait(channel, member)
            except RefusalError as error:
                channel.send({"op": "refused", "reason": str(error)})
                raise
            # `_drop` has cancelled the answer: another connection of this rank has taken over.
            except CancelledError:
                return
            channel.send(*answer)
            if answer[0]["op"] == "bye":
                return
            header, payload = channel.receive(self.meeting.limit(member))
            self.meeting.take(member, header, payload)

    def _wait(self, channel: Channel, member: Member) -> Answer:
        """Return the answer that is due, as long as the rank waits for it."""
        while True:
            try:
                # With a time limit, to notice a rank that has gone while it waits.
                return member.answer.result(_LOOK)
            except TimeoutError:
                if not channel.is_quiet():
                    raise MessageError(
                        "the other side closed the connection, or sent a message "
                        "before the server had answered"
                    ) from None
