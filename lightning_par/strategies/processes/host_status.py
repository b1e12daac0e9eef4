"""What the ranks of another host are doing, asked when this host cannot go on.

Note [Ask, don't listen]: nothing is sent while all is well. One thread of a host waits for
connections, at the address over which the hosts talk; who connects is told how the ranks of that
host are, and is not read. What no answer means is told by how it stays away: nothing comes back
(the host is down, or the network is cut), the kernel refuses (its processes have ended), or it
accepts and nobody speaks (they are frozen).
"""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

__all__ = ["Causes", "HostStatusServer", "OtherHost", "ask_hosts"]

_PATIENCE = 2.0
"""Seconds in which a host has to answer."""
_PERIOD = 0.5
"""Seconds after which the thread looks whether it shall end."""
_MOST = 32
"""Hosts that are asked at the same time."""


@dataclass(kw_only=True)
class Causes:
    """Why ranks of one host or of several cannot go on, the surest cause first.

    Attributes:
        dead: Ranks that are gone, each with what it was doing.
        failed: Ranks that raised, with their exceptions; the first to raise comes first.
        silent: Hosts that do not answer.
        stopped: Ranks that are stopped by a signal.
        waiting: Ranks that have been doing one thing for long: seconds, and who and what.
        ended: Ranks whose run is over.
    """

    dead: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    waiting: list[tuple[float, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def add(self, other: "Causes") -> None:
        """Add what another host says."""
        for name, said in vars(other).items():
            getattr(self, name).extend(said)


@dataclass(frozen=True, kw_only=True)
class OtherHost:
    """Another host of the run.

    Attributes:
        name: Host name.
        ranks: Its ranks, each with its place in the mesh.
        address: Where its `HostStatusServer` listens.
        port: And at which port.
    """

    name: str
    ranks: Sequence[str]
    address: str
    port: int

    def ask(self) -> Causes:
        """Return what its ranks say, or that they say nothing; see Note [Ask, don't listen]."""
        accepted = False
        # What has happened is told by where it fails: see the note.
        try:
            with socket.create_connection((self.address, self.port), _PATIENCE) as connection:
                accepted = True
                said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            return Causes(**json.loads(said))
        except (ConnectionRefusedError, ConnectionResetError):
            why = "answers, but its processes have ended. Their log or `dmesg` may say why"
        except (OSError, ValueError, TypeError):
            # Also an answer that is no JSON: something else listens there.
            why = f"does not answer at {self.address}: it is down, or the network to it is cut"
            if accepted:
                why = f"answers at {self.address}, but its processes do not: they are frozen"
        return Causes(silent=[f"host {self.name} ({', '.join(self.ranks)}) {why}"])


def ask_hosts(hosts: Sequence[OtherHost]) -> Causes:
    """Ask other hosts, at the same time, how their ranks are; takes 2 s if one does not answer."""
    found = Causes()
    if hosts:
        # At the same time, as each of them may take the full patience.
        with ThreadPoolExecutor(min(_MOST, len(hosts))) as pool:
            for causes in pool.map(OtherHost.ask, hosts):
                found.add(causes)
    return found


class HostStatusServer:
    """Tells other hosts how the ranks of this one are; see Note [Ask, don't listen].

    Args:
        address: Of this host, over which the others reach it.

    Attributes:
        tell: What it tells.
        port: Where it listens.

    Raises:
        OSError: This host cannot listen there.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self._socket.settimeout(_PERIOD)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self.tell: Callable[[], Causes] = Causes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="host-status", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            with suppress(OSError):  # also after `_PERIOD` without anybody
                connection = self._socket.accept()[0]
                with connection:
                    connection.settimeout(_PATIENCE)
                    # Nothing is read, so nobody can make this host do anything.
                    connection.sendall(json.dumps(vars(self.tell())).encode())

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._thread.join()
        self._socket.close()
