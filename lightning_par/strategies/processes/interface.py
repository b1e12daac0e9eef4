"""The network interface of this host over which it reaches another one.

Note [Route and name]: gloo and NCCL are told an interface by its name, and by themselves take the
one of the host's own name, or the first: often the loopback, or a network that leads nowhere. The
kernel knows better. A datagram socket that is connected sends nothing, but has the address from
which this host would send; the interface that has this address is the one. That of an address of
this host itself is found, too, though the kernel would send to it over the loopback.
"""

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["GLOO", "NCCL", "Route", "find_route", "is_loopback", "name_interface"]

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that gloo and NCCL read whenever they make a group."""
_ANY_PORT = 9
_FAMILIES = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where the bytes of an address are in a ``sockaddr`` of its family."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How this host reaches another.

    Attributes:
        address: Its own address on the way.
        interface: Name of the interface with this address; None where nothing tells.
    """

    address: str
    interface: str | None


def find_route(target: str) -> Route | None:
    """Return how this host reaches `target`, a name or an address; None if it does not.

    See Note [Route and name].

    Raises:
        OSError: The name has no address.
    """
    for family, kind, _, _, place in socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            # Sends nothing: UDP. Only the kernel's routing table is asked.
            probe.connect(place)
            address = str(probe.getsockname()[0]).partition("%")[0]
            return Route(address=address, interface=dict(_addresses()).get(address))
    return None


def is_loopback(address: str) -> bool:
    """Whether an address leads to this host alone."""
    return address.startswith("127.") or address == "::1"


def name_interface(name: str, *variables: str) -> list[str]:
    """Tell gloo and NCCL an interface, where the environment does not say another.

    Args:
        name: Of the interface.
        variables: `GLOO`, `NCCL` or both.

    Returns:
        The variables set here; the caller removes them at the end of the run.
    """
    free = [variable for variable in variables if variable not in os.environ]
    # NCCL would also take interfaces whose names only begin so.
    os.environ.update({variable: f"={name}" if variable == NCCL else name for variable in free})
    return free


class _Entry(ctypes.Structure):
    """One address of one interface, as ``getifaddrs`` lists them."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _addresses() -> Iterator[tuple[str, str]]:
    """Give every address of this host with its interface; nothing where the system cannot say."""
    if sys.platform not in ("linux", "darwin"):
        return
    library, first = ctypes.CDLL(None), ctypes.POINTER(_Entry)()
    # Nonzero: an error. Then nobody knows names, and the variables stay unset.
    if library.getifaddrs(ctypes.byref(first)):
        return
    try:
        entry: Any = first
        while entry:
            found = entry.contents
            if found.address:
                # Linux begins with the family in two bytes, macOS with a length and the family.
                head = ctypes.string_at(found.address, 2)
                family = (
                    head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
                )
                if family in _FAMILIES:
                    part = _FAMILIES[socket.AddressFamily(family)]
                    # The whole sockaddr up to the end of the address, then its slice.
                    packed = ctypes.string_at(found.address, part.stop)[part]
                    yield socket.inet_ntop(family, packed), found.name.decode()
            entry = found.next
    finally:
        library.freeifaddrs(first)
