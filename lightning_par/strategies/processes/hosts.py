"""The hosts of a run: how their ranks meet, over which interface they talk, who is where.

Note [Before any collective]: ranks meet at a store of rank 0, and each says on which host it is and
which address it has there. So all know, before a collective could hang, which ranks are missing,
whether the layout fits the hosts, and over which interface to connect.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.distributed import (  # type: ignore[attr-defined]
    default_pg_timeout,
    DistError,
    TCPStore,
)

from lightning_par.errors import ConfigurationError, MeshError
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.interface import (
    find_route,
    GLOO,
    is_loopback,
    name_interface,
    NCCL,
    Route,
)

__all__ = [
    "HostOf",
    "check_placement",
    "find_common_route",
    "gather_hosts",
    "meet_hosts",
    "name_common_interface",
    "number_of",
    "say_ranks",
    "with_ranks",
]

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where its agent serves the store, and not rank 0."""
_COUNT = "lightning_par/on"
"""Key of the number of ranks that have come."""
_PERIOD = 0.2
"""Seconds between two looks at who has come."""
_READ = "lightning_par/read"
"""Key of the number of ranks that have read who has come."""
_GRACE = 10.0
"""Seconds, at most, in which rank 0 keeps the store for ranks that have not read yet."""
_RETRY = 1.0
"""Seconds between two tries to resolve a name."""
_STREAM = socket.SOCK_STREAM
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostOf:
    """Where a rank is.

    Attributes:
        name: Host name.
        address: Address of the host on the way to rank 0.
    """

    name: str
    address: str


def meet_hosts(
    environment: ClusterEnvironment, rank: int, world_size: int, timeout: timedelta | None
) -> tuple[TCPStore, list[HostOf]]:
    """Wait until every rank has come; see Note [Before any collective].

    Args:
        environment: Knows the address and the port of rank 0.
        rank: Global rank of this process.
        world_size: Number of ranks.
        timeout: How long to wait; None: as long as torch waits.

    Returns:
        The store, and for every rank where it is.

    Raises:
        MeshError: Rank 0 was not found or not reached, or some ranks did not come.
    """
    limit = default_pg_timeout if timeout is None else timeout
    deadline = time.monotonic() + limit.total_seconds()
    address, port, name = environment.main_address, environment.main_port, socket.gethostname()
    # The time for a name to be known and for the ranks to come is one.
    route = _resolve(address, rank, name, deadline)
    # Under torchrun the agent serves it, at the same address and port.
    serves = rank == 0 and os.environ.get(_AGENT_STORE) != str(True)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        store = TCPStore(
            address,
            port,
            world_size,
            serves,
            timeout=left,
            wait_for_workers=False,
            # Handed over: a TCPStore would bind to all interfaces.
            master_listen_fd=_listen(address, port) if serves else None,
        )
        # First where, then the count: who has been counted can be read.
        store.set(_key(rank), json.dumps([name, route.address]))
        store.add(_COUNT, 1)
        _wait_for_all(store, rank, world_size, deadline, f"{address}:{port} within {limit}")
        said = store.multi_get([_key(r) for r in range(world_size)])
        _leave(store, rank, world_size)
    except DistError as error:
        raise MeshError(
            "LP708",
            f"rank {rank} on host {name} (address {route.address}) did not reach rank 0 at "
            f"{address}:{port} within {limit}: {str(error).partition(chr(10))[0]} Check that rank "
            "0 is running there, and that no firewall between the hosts blocks this port. "
            "MASTER_ADDR must be an address of the first host that the other hosts can reach.",
        ) from error
    # `left` was for the rendezvous; torch makes groups through this store later.
    store.set_timeout(default_pg_timeout)
    return store, [_read(text) for text in said]


def gather_hosts(address: str) -> list[HostOf]:
    """Return for every rank where it is, if the ranks have met already.

    Args:
        address: Address of rank 0.

    **Communicates**: a name and an address of every rank, between all.
    """
    route = find_route(address)
    own = HostOf(name=socket.gethostname(), address="" if route is None else route.address)
    # A group exists already, made by the user or by an earlier run.
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _key(rank: int) -> str:
    return f"lightning_par/on/{rank}"


def _read(said: bytes) -> HostOf:
    name, address = json.loads(said)
    return HostOf(name=name, address=address)


def _resolve(address: str, rank: int, name: str, deadline: float) -> Route:
    """Return the route to rank 0, whose name a cluster may still be about to learn."""
    warned = False
    while True:
        try:
            route = find_route(address)
            problem = "no interface of this host leads there"
        except OSError as error:
            route, problem = None, f"{error.strerror or error}"
        if route is not None:
            return route
        if time.monotonic() > deadline:
            # After at least one try, however short the time is.
            raise MeshError(
                "LP708",
                f"rank {rank} on host {name} cannot find rank 0 by MASTER_ADDR={address!r} "
                f"({problem}). Set MASTER_ADDR on every host to a name or address of the first "
                "host that every host can resolve.",
            )
        if not warned:
            text = (
                "rank %d on host %s cannot find rank 0 yet by MASTER_ADDR=%r (%s). It tries again."
            )
            _logger.warning(text, rank, name, address, problem)
            warned = True
        time.sleep(_RETRY)


def _listen(address: str, port: int) -> int | None:
    """Listen at the address of rank 0 alone; a TCPStore by itself does so on every interface.

    Returns:
        A listening socket; None if other hosts may know this one by an address that it does not
        know itself, as where its own name stands for a loopback address.
    """
    with suppress(OSError):
        found = {(f, place) for f, *_, place in socket.getaddrinfo(address, port, type=_STREAM)}
        (family, place), *others = found
        if not others and not is_loopback(str(place[0])):
            return socket.create_server(place[:2], family=family).detach()
    return None


def _wait_for_all(store: TCPStore, rank: int, world_size: int, deadline: float, where: str) -> None:
    """Wait until every rank has said where it is.

    Raises:
        MeshError: Some ranks did not come.
        DistError: The store is gone.
    """
    keys = [_key(rank) for rank in range(world_size)]
    # Everybody looks at one number: at all keys that would be much for thousands of ranks.
    while store.add(_COUNT, 0) < world_size or not store.check(keys):
        if time.monotonic() < deadline:
            time.sleep(_PERIOD)
            continue
        # Each key for itself, as `check` of all says only whether all are there.
        missing = [other for other in range(world_size) if not store.check([_key(other)])]
        there = [other for other in range(world_size) if other not in missing]
        hosts = [_read(store.get(_key(other))) for other in there]
        # All that came give up at the same deadline, and read who is missing.
        _leave(store, rank, len(there))
        raise MeshError(
            "LP707",
            f"{say_ranks(missing)} did not come to the rendezvous at {where}; "
            f"{_say_places(there, hosts)} came. The host of a missing rank did not start it, or "
            "cannot reach rank 0. Look at the first error in the log of the missing rank, and "
            "start all ranks again.",
        )


def _leave(store: TCPStore, rank: int, ranks: int) -> None:
    """Say that this rank has read; rank 0, whose end is that of the store, waits for the others."""
    deadline = time.monotonic() + _GRACE
    store.add(_READ, 1)
    # With a limit: a rank that died after it was counted never reads.
    while rank == 0 and store.add(_READ, 0) < ranks and time.monotonic() < deadline:
        time.sleep(_PERIOD)


def check_placement(sizes: ParallelSizes, hosts: Sequence[HostOf]) -> None:
    """Refuse tensor-parallel groups whose ranks are on different hosts.

    Args:
        sizes: Of the mesh.
        hosts: For every rank where it is.

    Raises:
        MeshError: Naming every such group, and where its ranks are.
    """
    problems = [
        _say_places(group, [hosts[rank] for rank in group])
        # Only tp: its all-reduces come in every layer, and wait for each other. Other axes may
        # span hosts.
        for group in sizes.groups(("tp",))
        if len({hosts[rank].name for rank in group}) > 1
    ]
    if problems:
        raise MeshError(
            "LP108",
            f"tensor_parallel_size={sizes.tensor} puts tensor-parallel groups across hosts: "
            f"{'; '.join(problems)}. The all-reduces of every layer would then go over the "
            "network between hosts. Number the ranks host by host, or use a tensor_parallel_size "
            "that divides the number of ranks of a host. To allow such groups, pass "
            "tensor_parallel_across_hosts=True.",
        )


def find_common_route(hosts: Sequence[HostOf], rank: int, address: str) -> Route | None:
    """Return how this host talks to the others, None where nothing tells.

    Rank 0 may know itself by a loopback address, under a name that others resolve to another one;
    its host takes the route to one of them.

    Args:
        hosts: For every rank where it is.
        rank: Global rank of this process.
        address: Address of rank 0.
    """
    route = find_route(address)
    others = [host.address for host in hosts if host.name != hosts[rank].name]
    if route is not None and is_loopback(route.address) and others:
        route = find_route(others[0])
    return route


def name_common_interface(hosts: Sequence[HostOf], rank: int, route: Route) -> list[str]:
    """Tell gloo and NCCL the interface of this host that leads to the others.

    Args:
        hosts: For every rank where it is.
        rank: Global rank of this process.
        route: From `find_common_route`.

    Returns:
        The environment variables set here; the caller removes them at the end of the run.
    """
    if route.interface is None:
        # gloo and NCCL find one themselves.
        return []
    own = hosts[rank].name
    # One rank per host says it.
    first = min(r for r, host in enumerate(hosts) if host.name == own)
    named = name_interface(route.interface, GLOO, NCCL)
    if rank == first:
        values = ", ".join(f"{name}={os.environ[name]}" for name in (GLOO, NCCL))
        text = "host %s reaches the other hosts from %s on interface %s; %s."
        _logger.info(text, own, route.address, route.interface, values)
    return named


def say_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 2, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _say_places(ranks: Sequence[int], hosts: Sequence[HostOf]) -> str:
    """Return ``ranks 0, 1 on host a and rank 2 on host b``."""
    found: dict[str, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        found.setdefault(host.name, []).append(rank)
    return " and ".join(f"{say_ranks(r)} on host {name}" for name, r in found.items())


def with_ranks(environment: ClusterEnvironment | None, size: int) -> ClusterEnvironment | None:
    """Return the environment, or that of a single process where `srun` has started none.

    In an allocation of `salloc` without `srun`, SLURM tells the number of tasks, and no rank.

    Args:
        environment: The one that Lightning has found.
        size: Number of processes that the Trainer asks for.

    Raises:
        ConfigurationError: There are to be several processes, and SLURM has not numbered them.
    """
    if not isinstance(environment, SLURMEnvironment):
        return environment
    names = "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"
    missing = [name for name in names if name not in os.environ]
    if missing and size > 1:
        raise ConfigurationError(
            "LP710",
            f"this process was not started by srun: SLURM has not set {', '.join(missing)}. "
            f"Start the {size} processes with srun. Or set SLURM_JOB_NAME=bash: this process then "
            "starts the other processes of its node itself.",
        )
    return LightningEnvironment() if missing else environment


def number_of(environment: ClusterEnvironment | None, num_nodes: int, num_local: int) -> int:
    """Return the rank of this process, counted node by node; the environment's if it fits none.

    Args:
        environment: Knows the node, and the number on it; None: there is one process.
        num_nodes: Of the run.
        num_local: Processes of a node.
    """
    if environment is None:
        return 0
    node, local = environment.node_rank(), environment.local_rank()
    # An environment that numbers otherwise is taken at its word.
    fits = 0 <= node < num_nodes and 0 <= local < num_local
    return node * num_local + local if fits else environment.global_rank()
