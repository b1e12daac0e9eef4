"""Rendezvous of the processes of one node, on the loopback, which no other host can reach."""

import os
import socket

from torch.distributed import default_pg_timeout, TCPStore  # type: ignore[attr-defined]

__all__ = ["INTERFACE", "loopback_store", "use_loopback"]

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that gloo reads whenever it makes a group."""
_LOOPBACK = "127.0.0.1"


def use_loopback() -> bool:
    """Let gloo connect over the loopback interface, unless GLOO_SOCKET_IFNAME says otherwise.

    Returns:
        Whether the variable was set here; the caller removes it at the end of the run.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names or INTERFACE in os.environ:
        return False
    os.environ[INTERFACE] = names[0]
    return True


def loopback_store(port: int, rank: int, world_size: int) -> TCPStore:
    """Make the store through which the processes find each other, once all of them are there.

    A TCPStore by itself listens on every interface, whatever its host name. Processes that still
    import have as long as torch gives them; the timeout of collectives may be shorter.

    Args:
        port: Port of rank 0, the same on every rank.
        rank: Global rank of this process; rank 0 listens.
        world_size: Number of ranks.
    """
    listening = None
    if rank == 0:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((_LOOPBACK, port))
            server.listen()
            listening = server.detach()
    return TCPStore(
        _LOOPBACK,
        port,
        world_size,
        rank == 0,
        timeout=default_pg_timeout,
        master_listen_fd=listening,
    )
