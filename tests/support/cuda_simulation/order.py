"""Whether what several ranks ask of NCCL fits together, or would hang.

Gloo matches messages by their peers and tags, whenever they are asked for. NCCL does not: the work
of a communicator runs in the order in which each rank asked for it, a send and its receive have to
be under way at the same time, and a communicator is made at its first use, where every member's
host waits for the others. `record_requests` notes on each rank what is asked for, in which order,
and after what; `check_order` then takes the requests of all ranks, and raises where they differ
or wait for each other in a circle.
"""

import contextlib
import inspect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from unittest.mock import patch

import torch.distributed as dist

from tests.support.cuda_simulation.runtime import device

__all__ = ["OrderError", "Requests", "check_order", "record_requests"]


class OrderError(AssertionError):
    """What ranks ask of NCCL does not fit together."""


@dataclass(frozen=True)
class _Request:
    """What one rank asked for at one time.

    Args:
        group: Name of the process group.
        pair: The two ranks of the group that have a communicator of their own; "": all.
        parts: Name, peer in the group (-1: all), dtype and shapes; several in a batch.
        stream: That it runs on; -1: a message between hosts.
        tick: Its number there.
        after: Stream -> number of the last request there that is over before this begins.
        known: The same, of what the host had waited for.
    """

    group: str
    pair: str
    parts: list
    stream: int
    tick: int
    after: dict
    known: dict

    @property
    def collectives(self):
        return tuple(
            (name, dtype, *map(tuple, s)) for name, peer, dtype, s in self.parts if peer < 0
        )

    def __str__(self):
        texts = []
        for name, peer, dtype, shapes in self.parts:
            where = f" with rank {peer} of the group" if peer >= 0 else ""
            texts.append(f"{name}{where} of {dtype} {shapes}")
        return f"{' and '.join(texts)} in group {self.group}"


@dataclass
class Requests:
    """What a rank asked for.

    Args:
        asked: In order.
        members: Name of a group -> global ranks of its members.
    """

    asked: list = field(default_factory=list)
    members: dict = field(default_factory=dict)


@contextlib.contextmanager
def record_requests():
    """Gives the `Requests` of this rank, which are filled at the end of the context.

    Inside another such context, this one alone gets them.
    """
    native, requests = device(), Requests()
    native.record(True)
    try:
        with contextlib.ExitStack() as stack:
            for name in ("isend", "irecv", "recv"):  # send calls isend, and recv irecv
                noted = _noted(getattr(dist, name), native)
                for module in (dist, dist.distributed_c10d):  # P2POp knows them from the latter
                    stack.enter_context(patch.object(module, name, noted))
            yield requests
        groups = dist.distributed_c10d._world.pg_map
        named = {group.group_name: dist.get_process_group_ranks(group) for group in groups}
        asked = [_Request(*entry) for entry in native.recorded()]
        requests.asked = [r for r in asked if r.group in named]  # others are destroyed
        requests.members = {r.group: named[r.group] for r in requests.asked}
    finally:
        native.record(False)


_UNDER_WAY = []
"""Names of the functions below that have been called: one may call another, in several layers."""


def _noted(function, native):
    """Gives the function, which notes messages between hosts.

    `recv` blocks its host until the message is there. That of `irecv` is taken not to wait: gloo
    itself would hang where it does for ever.
    """
    if hasattr(function, "notes"):
        return function
    parameters, name = inspect.signature(function), function.__name__

    def call(*args, **options):
        given = parameters.bind(*args, **options).arguments
        if given["tensor"].device.type == "cpu" and name != "recv" and name not in _UNDER_WAY:
            used = given.get("group") or dist.group.WORLD
            end = "src" if name == "irecv" else "dst"
            place = given.get(f"group_{end}")
            place = dist.get_group_rank(used, given[end]) if place is None else place
            receives = "host recv" if "recv" in _UNDER_WAY else "host irecv"
            native.note(used.group_name, "host send" if end == "dst" else receives, place)
        _UNDER_WAY.append(name)
        try:
            return function(*args, **options)  # recv calls irecv
        finally:
            _UNDER_WAY.pop()

    call.notes = True
    return call


def check_order(records, *, shared=False):
    """Raises where requests differ between ranks, or wait for each other.

    Args:
        records: Of every rank, `Requests`.
        shared: Whether messages between two ranks use the communicator of their group, as they do
            where `init_process_group` got a `device_id`; otherwise each pair makes its own.

    Raises:
        OrderError: With the requests that differ, or that wait for each other.
    """
    _Check(records, shared=shared).run()


class _Check:
    def __init__(self, records, *, shared):
        self.records, self.shared = records, shared
        self.members = {name: ranks for r in records for name, ranks in r.members.items()}
        self.asked = {(r, i): a for r, each in enumerate(records) for i, a in enumerate(each.asked)}
        self.of_tick = {(r, a.stream, a.tick): (r, i) for (r, i), a in self.asked.items()}
        self.users = defaultdict(lambda: defaultdict(list))  # communicator -> rank -> requests
        for node, request in self.asked.items():
            self.users[self.communicator(request)][node[0]].append(node)
        self.graph = TopologicalSorter()

    def communicator(self, request):
        on_host = request.stream < 0
        return request.group, "host" if on_host else "" if self.shared else request.pair

    def run(self):
        partners = defaultdict(list)
        for name, users in self.users.items():
            if name[1] != "host" and not self.shared:
                self.refuse_absent(name)
            for nodes in self.collectives(*name, users):
                for node in nodes:
                    partners[node] += nodes
            for sender, receiver in self.messages(name, users):
                partners[receiver].append(sender)
                partners[sender].append(receiver)
        for rank in range(len(self.records)):
            self.add_host(rank, partners)
            self.add_streams(rank, partners)
        try:
            self.graph.prepare()
        except CycleError as error:
            lines = dict.fromkeys(
                f"rank {rank}: {self.asked[rank, i]}" for _, rank, i in error.args[1]
            )
            raise OrderError("would hang under NCCL:\n  " + "\n  ".join(lines)) from None

    def collectives(self, group, pair, users):
        """Gives the requests that are one collective, after a comparison of all ranks."""
        calls = {
            rank: [n for n in users.get(rank, []) if self.asked[n].collectives]
            for rank in self.members[group]
        }
        if not any(calls.values()):
            return
        first = self.members[group][0]
        for number, nodes in enumerate(zip_longest(*calls.values())):
            wanted = nodes[0] and self.asked[nodes[0]].collectives
            for rank, node in zip(calls, nodes, strict=True):
                if (node and self.asked[node].collectives) != wanted:
                    texts = [
                        f"rank {r}: {self.asked[n] if n else 'nothing'}"
                        for r, n in ((first, nodes[0]), (rank, node))
                    ]
                    raise OrderError(
                        f"collective {number} of group {group} differs:\n  " + "\n  ".join(texts)
                    )
            yield nodes

    def messages(self, name, users):
        """Gives pairs of a send and its receive."""
        ranks = self.members[name[0]]
        ways = defaultdict(lambda: ([], []))
        for rank, nodes in users.items():
            for node in nodes:
                for part in self.asked[node].parts:
                    if part[1] >= 0:
                        ends = rank, ranks[part[1]]
                        is_receive = part[0].endswith("recv")
                        ways[ends[::-1] if is_receive else ends][is_receive].append((node, part))
        for (source, target), both in ways.items():
            for sent, received in zip_longest(*both):
                if sent is None or received is None or not _fit(sent[1], received[1]):
                    texts = [
                        f"rank {r}: {p and self.asked[p[0]]}"
                        for r, p in ((source, sent), (target, received))
                    ]
                    raise OrderError("a send and its receive differ:\n  " + "\n  ".join(texts))
                yield sent[0], received[0]

    def add_host(self, rank, partners):
        """Adds when a host asks, and when the call returns."""
        made = set()
        for i, request in enumerate(self.records[rank].asked):
            name, node = self.communicator(request), (rank, i)
            self.graph.add(("returns", *node), ("asks", *node))
            if i:
                self.graph.add(("asks", *node), ("returns", rank, i - 1))
            for ending in self.over(rank, request.known):
                self.graph.add(("asks", *node), ending)
            others = []
            if request.parts[0][0] == "host recv":
                others = partners[node]
            elif name[1] != "host" and not self.shared and name not in made:
                others = [nodes[0] for nodes in self.users[name].values()]
            made.add(name)
            for other in others:
                self.graph.add(("returns", *node), ("asks", *other))

    def refuse_absent(self, name):
        """Every member of a communicator has to be there when it is made."""
        ranks = self.members[name[0]]
        wanted = set(ranks) if not name[1] else {ranks[int(i)] for i in name[1].split("-")}
        if absent := wanted - set(self.users[name]):
            first = self.asked[next(iter(self.users[name].values()))[0]]
            raise OrderError(f"ranks {sorted(absent)} never use the communicator of {first}")

    def add_streams(self, rank, partners):
        """Adds when a request begins, and when it is over."""
        last = {}
        for i, request in enumerate(self.records[rank].asked):
            name, node = self.communicator(request), (rank, i)
            if request.stream < 0:
                continue
            self.graph.add(("begins", *node), ("returns", *node))
            self.graph.add(("ends", *node), ("begins", *node))
            for ending in self.over(rank, request.after):
                self.graph.add(("begins", *node), ending)
            if name in last:
                self.graph.add(("begins", *node), ("ends", *last[name]))
            last[name] = node
            for other in partners[node]:
                self.graph.add(("ends", *node), ("begins", *other))

    def over(self, rank, ticks):
        """Gives the ends of requests that some clock knows."""
        for stream, tick in ticks.items():
            if node := self.of_tick.get((rank, stream, tick)):
                yield "ends", *node


def _fit(sent, received):
    """Whether a receive takes what is sent; NCCL knows neither names nor shapes."""
    counts = [sum(map(math.prod, part[3])) for part in (sent, received)]
    return sent[2] == received[2] and counts[0] == counts[1]
