"""Rendezvous of the processes of one node, on the loopback, which no other host can reach; and how
a process leaves.
"""

import atexit
import gc
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    default_pg_timeout,
    DistError,
    HashStore,
    TCPStore,
)

from lightning_par.errors import MeshError
from lightning_par.strategies.processes.interface import GLOO, name_interface
from lightning_par.strategies.processes.interruption import Interruption

__all__ = ["init_alone", "leave_at_exit", "loopback_store", "spare_forks", "use_loopback"]

_LOOPBACK = "127.0.0.1"
_PERIOD = 0.05
"""Seconds between two looks at who has come."""


@cache
def spare_forks() -> None:
    """Let processes that are forked from now on, such as workers of data loaders, never collect
    what they inherit.

    The groups of an earlier run are garbage that nobody has collected yet. A worker that does so
    joins threads of gloo that it does not have: it hangs, or dies.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
        os.register_at_fork(after_in_child=gc.freeze)


def use_loopback() -> list[str]:
    """Let gloo connect over the loopback interface, unless GLOO_SOCKET_IFNAME says otherwise.

    Returns:
        The variables set here; the caller removes them at the end of the run.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return name_interface(names[0], GLOO) if names else []


def loopback_store(
    port: int, rank: int, world_size: int, patience: timedelta | None = None
) -> TCPStore:
    """Make the store through which the processes find each other, once all of them are there.

    A TCPStore by itself listens on every interface, whatever its host name.

    Args:
        port: Port of rank 0, the same on every rank.
        rank: Global rank of this process; rank 0 listens.
        world_size: Number of ranks.
        patience: How long to wait for the others; None: as long as torch waits. The timeout of
            collectives may be shorter: processes may still import, or prepare data.

    Raises:
        MeshError: Some ranks did not come.
    """
    limit = default_pg_timeout if patience is None else patience
    listening = None
    if rank == 0:
        with socket.socket() as server:
            # The port of a run that has just ended is in TIME_WAIT.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((_LOOPBACK, port))
            server.listen()
            # The store closes it.
            listening = server.detach()
    try:
        store = TCPStore(
            _LOOPBACK,
            port,
            world_size,
            rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except DistError as error:
        raise _absent([0], port, limit) from error
    store.set(_key(rank), "")
    began = time.monotonic()
    while missing := [r for r in range(world_size) if not store.check([_key(r)])]:
        if time.monotonic() - began > limit.total_seconds():
            raise _absent(missing, port, limit)
        time.sleep(_PERIOD)
    # Rank 0 serves the store: it goes on once nobody asks it for the others any more.
    store.set_timeout(default_pg_timeout)
    return store


def leave_at_exit(interruption: Interruption) -> None:
    """Destroy the process groups when this process ends, as NCCL's have to be; gloo's need not.

    Args:
        interruption: Of the run. After an exception others may be gone, with messages to them under
            way that nobody would end; then the process just ends.
    """
    known = weakref.ref(interruption)  # which knows the module, and with it the weights

    def leave() -> None:
        interruption = known()
        if dist.is_initialized() and not (interruption and interruption.is_handled):
            dist.destroy_process_group()

    atexit.register(leave)


def _key(rank: int) -> str:
    return f"lightning_par/here/{rank}"


def _absent(missing: Sequence[int], port: int, limit: timedelta) -> MeshError:
    named = "rank " + ", ".join(map(str, missing))
    return MeshError(
        "LP707",
        f"{named} did not come to the rendezvous at port {port} within {limit}. A missing rank "
        "ended before its Trainer ran, or was never started. Look at the first error in its log, "
        "and start all ranks again.",
    )


def init_alone(backend: str, timeout: timedelta | None) -> None:
    """Make the world of one process, which prints nothing that a run without it would not.

    Args:
        backend: For all devices, or by device.
        timeout: Of its collectives.
    """
    chosen: str | None = backend
    if backend == "gloo" and not torch.accelerator.is_available():
        # Torch chooses it by itself. Of "cpu:gloo" it would warn at the end ("No backend of type
        # 0"), and where the backend is "gloo", Lightning evaluates without inference mode.
        chosen = None
    elif ":" not in backend:
        chosen = f"cpu:{backend}"
    print_exception = sys.excepthook
    dist.init_process_group(chosen, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    sys.excepthook = print_exception  # torch's puts the rank before every line
