"""Who has come, what they brought, and when it is merged: the server without its sockets.

A round of a fragment opens with the first island whose ranks have all sent their movement. It ends
when every live island has sent one, or when `min_islands` have and `grace` seconds are over. Who
was late is not waited for until it is heard of again; what comes late counts in the next round.

Note [Parts of a round]: where a mean is taken, an island that is connected but not in a round
counts as one that has not moved yet. Else a round that falls into two would make two whole steps,
both from the same weights. One that was in none of the last 2 n rounds of a fragment, n the number
of islands, may be frozen: it counts again once it is heard of. The parameter server (``"sgd"``)
applies what comes as it is.

Note [Tickets]: a movement has a ticket, the same on all ranks of its island. Where a connection
breaks while an answer is due, the rank comes back with its ticket: if that movement was merged it
gets the weights, else it sends the movement again. So none is counted twice, and none is lost.

Note [Versions]: an update is only of use to an island that holds the version before it. Others get
the weights themselves. Versions count within an era, which a server that lost its state begins
anew.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock, Timer
from typing import Any

import torch
from torch import Tensor

from lightning_par.dtensor import narrowed
from lightning_par.engine.data.islands.channel import Answer, MessageError
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.regions import Hello, number, read_regions, Region
from lightning_par.engine.data.islands.weights import load_weights, SharedWeights

__all__ = ["Meeting", "Member", "RefusalError"]

_log = logging.getLogger(__name__)


class RefusalError(Exception):
    """What an island asks for cannot be; the text says why, and is sent to it."""


@dataclass(eq=False)
class Member:
    """A connected rank of an island, and the answer that is due to it."""

    hello: Hello
    answer: "Future[Answer]" = field(default_factory=Future)

    def __str__(self) -> str:
        return f"island {self.hello.island} rank {self.hello.rank}"

    def ask(self) -> "Future[Answer]":
        """Return a new answer, which is due."""
        self.answer = Future()
        return self.answer


@dataclass(frozen=True, kw_only=True)
class _Movement:
    """What one rank sent for one fragment."""

    member: Member
    answer: "Future[Answer]"
    ticket: str
    base: tuple[str, int]
    samples: float
    step: int
    pace: int
    place: Any
    boxes: list[tuple[Region, Tensor]]


@dataclass
class _Round:
    """Movements of one fragment by island and rank, and when the first island was complete."""

    movements: dict[int, dict[int, _Movement]] = field(default_factory=dict)
    opened: float | None = None

    def complete(self) -> list[int]:
        """Return the islands of which all ranks have sent the same movement."""
        return [
            island
            for island, ranks in self.movements.items()
            if len({m.ticket for m in ranks.values()}) == 1
            and all(len(ranks) == m.member.hello.world for m in ranks.values())
        ]


class Meeting:
    """Holds the weights that count, and answers the ranks of islands.

    Args:
        state: Folder in which every merged fragment is saved before it is answered, and from which
            a new server goes on; None: a server that ends loses them.
    """

    def __init__(self, state: Path | None = None) -> None:
        self._lock, self._state = RLock(), state
        self._weights = None if state is None else load_weights(state)
        self._outer = None if self._weights is None else self._weights.outer
        self._members: dict[tuple[int, int], Member] = {}
        self._seeds: dict[Member, list[tuple[Region, Tensor]]] = {}
        self._incarnations: dict[int, str] = {}
        self._founder: int | None = None
        self._expected = 1
        self._paces: dict[int, int] = {}
        self._merged_at: float | None = None
        self._starts: dict[int, tuple[int, float, int]] = {}
        self._absent: dict[int, int] = {}
        self._finished: set[int] = set()
        self._rounds: list[_Round] = []
        if self._weights is not None:
            self._rounds = [_Round() for _ in self._weights.fragments]
            _log.info("the server continues from its saved state at step %d", self._weights.step)

    @property
    def weights(self) -> SharedWeights | None:
        """The weights that count; None: no island has come yet."""
        return self._weights

    def waiting(self) -> list[int]:
        """Return the islands whose movement is complete, but not merged yet."""
        with self._lock:
            return sorted({island for held in self._rounds for island in held.complete()})

    def finished(self) -> set[int]:
        """Return the islands that have finished their run."""
        with self._lock:
            return set(self._finished)

    def expect(self, count: int) -> None:
        """Let the run begin only once so many islands have come."""
        with self._lock:
            self._expected = count
            if self._weights is None:
                self._found()

    def enter(self, hello: Hello) -> Member:
        """Take a rank in; its answer is the model, or a request for it.

        Raises:
            RefusalError: It is of another run.
        """
        with self._lock:
            self._check(hello)
            if self._incarnations.get(hello.island) != hello.incarnation:
                self._incarnations[hello.island] = hello.incarnation
                self._absent.pop(hello.island, None)
                self._starts.pop(hello.island, None)  # one for all of its ranks
                for held in self._rounds:
                    held.movements.pop(hello.island, None)
                _log.info("island %d joins with %d ranks", hello.island, hello.world)
            self._finished.discard(hello.island)
            member = Member(hello)
            old = self._members.get((hello.island, hello.rank))
            if old is not None:
                self._drop(old)
            self._members[hello.island, hello.rank] = member
            if self._weights is not None:
                self._welcome(member)
            else:
                self._found()
            return member

    def _check(self, hello: Hello) -> None:
        """Refuse a rank whose options or model are not those of the run."""
        outer = Outer(**hello.outer)
        if self._outer is None:
            self._outer = outer
        here, there = self._outer.agreement(), outer.agreement()
        if unlike := [n for n, value in there.items() if here[n] != value]:
            differ = [f"{n}={there[n]!r} here, {n}={here[n]!r} on the server" for n in unlike]
            raise RefusalError(f"all islands need the same options: {'; '.join(differ)}.")
        held = self._weights
        for region in hello.regions if held is not None else ():
            assert held is not None
            known = held.exact.get(region.name)
            found = None if known is None else (tuple(known.shape), known.dtype)
            if found != (own := (region.shape, region.torch_dtype)):
                raise RefusalError(
                    f"the parameter {region.name} has the shape and dtype {own} on this island, "
                    f"but on the server {found or 'it does not exist'}."
                )
            if region.trains != (region.name not in held.frozen):
                raise RefusalError(f"{region.name} is trained on some islands, frozen on others.")

    def _found(self) -> None:
        """Ask one island for the model; the others wait for it."""
        islands = {island for island, _ in self._members}
        if len(islands) < self._expected:
            return
        if self._founder not in islands:
            self._founder = min(islands, default=None)
        for (island, _), member in self._members.items():
            if island == self._founder and not member.answer.done() and member not in self._seeds:
                member.answer.set_result(({"op": "seed"}, b""))

    def limit(self, member: Member) -> int:
        """Return the bytes of the longest message that a rank may send."""
        entries = (torch.Size(r.size).numel() * 8 + 8 for r in member.hello.regions if r.sends)
        return sum(entries)

    def take(self, member: Member, header: Mapping[str, Any], payload: memoryview) -> None:
        """Take a message of a rank; `member.answer` is what is due to it then.

        Raises:
            MessageError: It is no message that could be.
        """
        kind = header.get("op")
        if kind == "seed" and self._weights is None and self._founder == member.hello.island:
            self._take_seed(member, header, payload)
        elif kind == "move" and self._weights is not None:
            self._take_movement(member, header, payload)
        elif kind == "bye":
            with self._lock:
                self._finished.add(member.hello.island)
                self._forget_place(member.hello.island)
                member.ask().set_result(({"op": "bye"}, b""))
        else:
            raise MessageError(f"the message {kind!r} is not expected now")

    def _take_seed(self, member: Member, header: Mapping[str, Any], payload: memoryview) -> None:
        try:
            step = number(header["step"])
        except (KeyError, ValueError) as error:
            raise MessageError(f"the model in the message is not valid: {error!r}") from error
        sent = [region for region in member.hello.regions if region.sends]
        values = read_regions(payload, sent, "none", alone=True)
        with self._lock:
            member.ask()
            self._seeds[member] = list(zip(sent, values, strict=True))
            ranks = [m for (island, _), m in self._members.items() if island == self._founder]
            if len(ranks) < member.hello.world or not all(m in self._seeds for m in ranks):
                return
            self._begin([pair for m in ranks for pair in self._seeds[m]], step)

    @torch.no_grad()
    def _begin(self, boxes: list[tuple[Region, Tensor]], step: int) -> None:
        tensors: dict[str, Tensor] = {}
        given = dict.fromkeys((region.name for region, _ in boxes), 0)
        for region, values in boxes:
            empty = torch.zeros(region.shape, dtype=values.dtype)
            # Boxes of several ranks make a whole tensor; they are checked to fill it.
            narrowed(tensors.setdefault(region.name, empty), region.box).copy_(values)
            given[region.name] += values.numel()
        missing = [name for name, tensor in tensors.items() if given[name] != tensor.numel()]
        if missing:
            raise MessageError(f"only a part of the weight {missing[0]} was sent")
        trained = [name for name in tensors if any(r.trains and r.name == name for r, _ in boxes)]
        assert self._outer is not None
        # A random era: versions of a server that lost its state mean nothing here.
        self._weights = SharedWeights(self._outer, tensors, trained, secrets.token_hex(8))
        self._weights.step = step
        self._rounds = [_Round() for _ in self._weights.fragments]
        self._seeds.clear()
        for at in range(len(self._rounds)):
            self._save(at)
        # Who waited is compared with the model that now exists.
        for member in [m for m in self._members.values() if not m.answer.done()]:
            try:
                self._check(member.hello)
            except RefusalError as error:
                member.answer.set_exception(error)
            else:
                self._welcome(member)

    def _welcome(self, member: Member) -> None:
        """Answer with the weights that a rank holds, or with those that it waited for."""
        held, hello = self._weights, member.hello
        assert held is not None
        counted = [f.counted.get(str(hello.island)) for f in held.fragments]
        shares = [f.shares.get(str(hello.island), 1.0) for f in held.fragments]
        header = {
            "op": "welcome",
            "era": held.era,
            "versions": [fragment.version for fragment in held.fragments],
            "fragments": [fragment.names for fragment in held.fragments],
            "counted": counted,
            "shares": shares,
            "start": self._starts.setdefault(hello.island, self._start(hello.island)),
            "step": held.step,
            "place": held.place(hello.island),
        }
        wanted = list(hello.regions)
        if hello.pending is not None:
            # The rank comes back for the answer to a movement: it needs that fragment only.
            at, ticket = hello.pending
            merged = at < len(counted) and counted[at] == ticket
            names = held.fragments[at].names if merged else []
            wanted = [region for region in wanted if region.name in names]
        member.answer.set_result((header, b"".join(held.whole(r.box) for r in wanted)))

    def _start(self, island: int) -> tuple[int, float, int]:
        """Return how an island that comes now gets into step with the others: the fragment whose
        turn it is, its steps in a second as a part of those of the fastest, and the steps that it
        has missed since the last round.
        """
        assert self._weights is not None
        versions = [fragment.version for fragment in self._weights.fragments]
        turn = versions.index(min(versions))
        share = self._weights.fragments[turn].shares.get(str(island), 1.0)
        others = self._live - {island, *self._absent}
        paces = [self._paces[number] for number in others if self._paces.get(number)]
        if self._merged_at is None or not paces:
            return turn, share, 0
        pace = self._paces.get(island) or max(paces)
        return turn, share, round(1e6 * (time.monotonic() - self._merged_at) / pace)

    def _take_movement(
        self, member: Member, header: Mapping[str, Any], payload: memoryview
    ) -> None:
        held, hello = self._weights, member.hello
        assert held is not None
        try:
            at = number(header["fragment"], 0, len(held.fragments) - 1)
            samples, step = number(header["samples"]), number(header["step"])
            pace = number(header["pace"])
            era, version = header["base"]
            ticket = str(header["ticket"])
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the update in the message is not valid: {error!r}") from error
        sent = [r for r in hello.regions if r.sends and r.name in held.fragments[at].names]
        # Decoded before the lock is taken; a bad message is refused and changes nothing.
        values = read_regions(payload, sent, held.outer.quantize, alone=True)
        with self._lock:
            self._absent.pop(hello.island, None)
            # A movement that comes again, after a lost connection, takes the place of the first.
            self._rounds[at].movements.setdefault(hello.island, {})[hello.rank] = _Movement(
                member=member,
                answer=member.ask(),
                ticket=ticket,
                base=(era, version),
                samples=samples,
                step=step,
                pace=pace,
                place=header.get("place"),
                boxes=list(zip(sent, values, strict=True)),
            )
            if hello.island in self._rounds[at].complete():
                self._check_whole(at, hello.island)
            self._decide(at)

    def _check_whole(self, at: int, island: int) -> None:
        """Refuse what an island has sent of a fragment if it is not all of it."""
        assert self._weights is not None
        ranks = self._rounds[at].movements[island].values()
        entries = sum(self._weights.exact[n].numel() for n in self._weights.fragments[at].names)
        sent = sum(values.numel() for movement in ranks for _, values in movement.boxes)
        if sent == entries:
            return
        del self._rounds[at].movements[island]
        for movement in ranks:
            if movement.answer.set_running_or_notify_cancel():
                said = f"island {island} sent {sent:,} of {entries:,} entries of its update. All "
                said += "islands need the same model, and the same servers in the same order."
                movement.answer.set_exception(RefusalError(said))

    def _forget_place(self, island: int) -> None:
        """Let an island that has finished begin its data anew if it comes for another run."""
        for at, fragment in enumerate(self._weights.fragments if self._weights is not None else ()):
            if fragment.places.pop(str(island), None) is not None:
                self._save(at)

    def leave(self, member: Member) -> None:
        """Forget a rank whose connection has ended; what it sent still counts."""
        with self._lock:
            hello = member.hello
            # A new connection of the same rank may be here already.
            if self._members.get((hello.island, hello.rank)) is not member:
                return
            self._drop(member)
            if all(island != hello.island for island, _ in self._members):
                _log.info("island %d has left", hello.island)
            if self._weights is None:
                self._found()
            for at in range(len(self._rounds)):
                self._decide(at)

    def _drop(self, member: Member) -> None:
        del self._members[member.hello.island, member.hello.rank]
        self._seeds.pop(member, None)
        member.answer.cancel()

    def _decide(self, at: int) -> None:
        """Merge what has come for a fragment, if it is time."""
        assert self._outer is not None
        held, grace = self._rounds[at], self._outer.grace
        there = held.complete()
        # A round begins with an island whose ranks have all come.
        if not there:
            return
        if held.opened is None:
            held.opened = time.monotonic()
            if 0 < grace < float("inf"):
                timer = Timer(grace + 0.01, self._remind, (held, at))  # never a moment too early
                timer.daemon = True
                timer.start()
        # Islands that have finished are not waited for.
        if len(there) < max(1, self._outer.min_islands - len(self._finished)):
            return
        missing = self._live - set(there)
        # Who was late before is not waited for again, until it is heard of.
        late = missing - self._absent.keys()
        if late and time.monotonic() - held.opened < grace:
            return
        self._merge(at, there, sorted(late))
        self._absent |= {island: self._absent.get(island, 0) + 1 for island in missing}

    def _remind(self, opened: _Round, at: int) -> None:
        with self._lock:
            # The round that the timer was set for may be over.
            if self._rounds[at] is opened:
                self._decide(at)

    def _merge(self, at: int, there: list[int], late: list[int]) -> None:
        weights, done = self._weights, self._rounds[at]
        assert weights is not None
        # A new round at once: what comes from now on is of the weights that are made here.
        self._rounds[at] = _Round()
        # What has come of other islands in part belongs to the next round.
        self._rounds[at].movements = {i: m for i, m in done.movements.items() if i not in there}
        movements = {i: list(done.movements[i].values()) for i in there}
        samples = {i: min(m.samples for m in ranks) for i, ranks in movements.items()}
        # Weights that sum to `part`, below 1 where islands are missing: see Note [Parts of a
        # round].
        total = (sum(samples.values()) or 1) / self._part(there)
        fragment, before = weights.fragments[at], (weights.era, weights.fragments[at].version)
        updates, seen = weights.merge(
            at,
            [
                # Sorted, so that sums of floats do not depend on who came first.
                (samples[i] / total, [(r.box, v) for m in ranks for r, v in m.boxes])
                for i, ranks in sorted(movements.items())
            ],
        )
        weights.step = max([weights.step, *(m.step for r in movements.values() for m in r)])
        fragment.counted |= {str(i): ranks[0].ticket for i, ranks in movements.items()}
        for i in there:
            first = done.movements[i][0]
            if first.place is not None:
                fragment.places[str(i)] = first.step, first.place
        self._paces |= {i: max(m.pace for m in ranks) for i, ranks in movements.items()}
        self._merged_at = time.monotonic()
        fragment.shares |= {str(i): self._share(i) for i in there}
        # Before anybody is answered: what an island has heard must not be lost by a restart.
        self._save(at)
        header = {"op": "update", "version": fragment.version, "step": weights.step}
        header |= {"islands": sorted(there), "late": late, "movements": seen}
        for movement in (m for ranks in movements.values() for m in ranks):
            # An update is of use on top of the version before it only.
            follows = bool(updates) and movement.base == before
            held = [r for r in movement.member.hello.regions if r.name in fragment.names]
            parts = (updates[r.name].pack(r.box) if follows else weights.whole(r.box) for r in held)
            own = {
                "whole": not follows,
                "share": fragment.shares[str(movement.member.hello.island)],
            }
            # False if the rank has left meanwhile, and nobody waits.
            if movement.answer.set_running_or_notify_cancel():
                movement.answer.set_result(({**header, **own}, b"".join(parts)))

    def _part(self, there: list[int]) -> float:
        """Return how much of a step a round of these islands makes; see Note [Parts of a round]."""
        assert self._outer is not None
        if self._outer.optimizer == "sgd":
            return 1.0
        # An island that was in none of the last 2 n rounds may be frozen, see the note.
        live = self._live
        longest = 2 * len(live) * len(self._rounds)
        counted = {island for island in live if self._absent.get(island, 0) < longest}
        return len(there) / len(counted | {*there})

    @property
    def _live(self) -> set[int]:
        """Islands that are connected, and have not finished."""
        return {island for island, _ in self._members} - self._finished

    def _share(self, island: int) -> float:
        """Return the steps of an island in a second, as a part of those of the fastest one."""
        there = {number for number, _ in self._members} | {island}
        # Paces are microseconds of a step: the smallest is the fastest.
        fastest = min(filter(None, (self._paces.get(number, 0) for number in there)), default=0)
        return fastest / self._paces[island] if self._paces[island] else 1.0

    def _save(self, at: int) -> None:
        if self._state is not None:
            assert self._weights is not None
            try:
                self._weights.save(self._state, at)
            except OSError as error:  # the islands can go on; a restart would lose this round
                _log.error("fragment %d is not saved to %s: %s", at, self._state, error)
