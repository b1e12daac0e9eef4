"""A rank of an island: sends how far its part of the island moved, takes what became of it."""

import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.pieces import Piece
from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.channel import Answer, Channel, MessageError
from lightning_par.engine.data.islands.coding import encode
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.regions import Hello, read_regions, Region
from lightning_par.engine.data.islands.weights import Movement
from lightning_par.errors import IslandError, NonFiniteError

__all__ = ["Exchange", "IslandClient", "Place"]

_log = logging.getLogger(__name__)
_CURE = "Give all islands the same model and outer=, and each its own LIGHTNING_PAR_ISLAND."
_RETRY = 0.2
"""Seconds between two attempts to reach a server that is away, times 1 to 2."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        server: ``host:port``.
        key: The shared key.
        island: Number of its island.
        rank: Rank within the island.
        world: Ranks of the island.
        incarnation: Random name of this start of the island, the same on its ranks.
    """

    server: str
    key: bytes
    island: int
    rank: int
    world: int
    incarnation: str


@dataclass(eq=False)
class _Held:
    """A part of a parameter on this rank.

    `values` is what trains, in its own memory. `base` is what all islands share, as of the last
    exchange, on the CPU. `owed` is what encoding left out of the movements sent so far.
    """

    region: Region
    values: Tensor
    base: Tensor
    owed: Tensor | None = None

    def now(self) -> Tensor:
        """Return a copy of the values on the CPU, in the dtype of the exchange."""
        # A copy even if nothing has to be converted: training goes on in these values.
        return self.values.detach().to("cpu", self.base.dtype, copy=True)

    def start(self) -> Tensor:
        """Return the base as the values had it; they may have fewer bits."""
        # bfloat16 values cannot hold the base: the movement is counted from what they could hold.
        return self.base.to(self.values.dtype).to(self.base.dtype)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A movement on its way: the fragment, the step at which it left, and the weights then."""

    number: int
    step: int
    there: list[Tensor]
    answer: "Future[Answer]"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange of a fragment, as an island saw it.

    Attributes:
        step: Own steps of the island when its movement left.
        fragment: Number of the fragment.
        islands: Whose movements made up the update; empty if the answer was lost once.
        late: Islands that were live, but too late for it.
        movements: What those of `islands` were like.
        waited: Seconds that training waited for the answer.
        staleness: Updates of the fragment that others had made since the island took its base.
    """

    step: int
    fragment: int
    islands: list[int]
    late: list[int]
    movements: list[Movement]
    waited: float
    staleness: int


class IslandClient:
    """Exchanges the weights of one rank with the server; see `Meeting`.

    Args:
        outer: The options of the run.
        place: Where this rank is.
        pieces: Its parts of the parameters; their values are changed in place.
        sends: Which of their boxes this rank sends; another rank of the island holds the others.
        trained: Names of the parameters that change.
        exchanges: Every exchange is added to it, also by clients of other servers.

    Attributes:
        step: Optimizer steps since the run began, of the island that made most, as last heard.
            Before `join` those of this island, from which a new run counts on.
        place: What `send` was told of this island's place in its data when it last sent a
            movement that counts, by whatever process; None: nothing.
        waited: Seconds that training waited for exchanges.
    """

    def __init__(
        self,
        outer: Outer,
        place: Place,
        pieces: Sequence[Piece],
        sends: frozenset[Box],
        trained: frozenset[str],
        exchanges: list[Exchange],
    ) -> None:
        self._outer, self._place = outer, place
        self._held = [_hold(piece, sends, trained) for piece in pieces]
        self._channel: Channel | None = None
        self._closed = threading.Event()
        # One thread, so that messages of this rank keep their order.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="islands")
        self._flight: _Flight | None = None
        self._fragments: list[list[_Held]] = []
        self._versions: list[tuple[str, int]] = []
        self._own_steps = self._exchange = self._first = self._samples = 0
        self._samples_before = [0] * outer.fragments
        self._left_at = [0] * outer.fragments
        # Share of the fastest island's pace, and the own step at which the next movement leaves.
        self._share, self._next = 1.0, 0
        self._clock, self._spent, self._paced_at = time.monotonic(), 0.0, 0
        self.step = 0
        self.place: Any = None
        self.waited = 0.0
        self._exchanges = exchanges
        self._bytes = [0, 0]

    @property
    def era(self) -> str:
        """Random name of the run, which the server gave."""
        return self._versions[0][0]

    @property
    def sent(self) -> int:
        """Bytes sent by this rank, of everything."""
        return self._bytes[0] + (0 if self._channel is None else self._channel.sent)

    @property
    def received(self) -> int:
        """Bytes received by this rank, of everything."""
        return self._bytes[1] + (0 if self._channel is None else self._channel.received)

    @property
    def exchanges_next(self) -> bool:
        """Whether the next `send` sends a movement."""
        return self._own_steps + 1 == self._next

    @property
    def _stride(self) -> int:
        """Own steps from the last exchange to the next one."""
        every, count, turn = self._outer.every, self._outer.fragments, self._first + self._exchange
        # Differences of rounded-down multiples: over `count` turns they add up to `every`.
        steps = (turn + 1) * every // count - turn * every // count
        return max(1, round(steps * self._share)) if self._outer.adapt else steps

    @torch.no_grad()
    def join(self) -> None:
        """Meet the server, and take its weights.

        Raises:
            IslandError: It is not there, or this island is none of its run.
        """
        header, payload = self._try(lambda: self._connect(None))
        regions = [held.region for held in self._held]
        # Everything the islands share, also frozen parameters, which are sent once.
        for held, new in zip(
            self._held, read_regions(memoryview(payload), regions, "none", alone=False), strict=True
        ):
            held.base = new
            held.values.copy_(new)
        names = header["fragments"]
        self._fragments = [[h for h in self._held if h.region.name in set(part)] for part in names]
        self._versions = [(header["era"], version) for version in header["versions"]]
        self._first, self._share, missed = header["start"]
        # What the others did since their last exchange counts as made, so that all come together.
        self._next = max(1, self._stride - missed)
        self.step, self.place = header["step"], header["place"]

    def send(self, samples: int, place: Any = None) -> None:
        """Send what is due after an optimizer step; `settle` is called after it, on every rank of
        the island.

        Args:
            samples: Samples of the island in this step and those before it that were not counted.
            place: Where its data stand, of JSON types; that of its first rank is kept.

        Raises:
            IslandError: The server is away for too long.
            NonFiniteError: A weight is NaN or infinite; nothing was sent of it.
        """
        self._own_steps += 1
        self._spent += time.monotonic() - self._clock
        self._samples += samples
        self.step += 1
        flight = self._flight
        is_due = self._own_steps == self._next
        # At most one movement is on its way, and it has to be back `overlap` steps later.
        if flight is not None and (is_due or self._own_steps >= flight.step + self._outer.overlap):
            self._finish()
        if is_due:
            self._start((self._first + self._exchange) % self._outer.fragments, place)
            self._exchange += 1
            self._next = self._own_steps + self._stride

    def settle(self) -> None:
        """Wait for the answer to what was sent, unless training goes on meanwhile."""
        # In step: with an overlap the answer is taken by a later `send`.
        if self._flight is not None and not self._outer.overlap:
            self._finish()
        self._clock = time.monotonic()

    def finish(self, samples: int) -> None:
        """Exchange what was learned since the last exchanges, and give every parameter the value
        that all islands share; every rank of the island calls this.

        Args:
            samples: As for `send`.

        Raises:
            IslandError: The server is away for too long.
            NonFiniteError: A weight is NaN or infinite; nothing was sent of it.
        """
        self._samples += samples
        if self._flight is not None:
            self._finish()
        following = self._first + self._exchange
        for turn in range(following, following + self._outer.fragments):
            number = turn % self._outer.fragments
            # A fragment that left after the last step has nothing new to send.
            if self._own_steps > self._left_at[number]:
                self._start(number)
                self._finish()
        for held in self._held:
            held.values.copy_(held.base)

    def shared(self) -> dict[Box, Tensor]:
        """Return the parts of this rank as all islands share them, as of their last exchanges."""
        return {held.region.box: held.base for held in self._held}

    def leave(self) -> None:
        """Tell the server that this island has finished its run, and close."""
        if self._channel is not None and not self._closed.is_set():
            try:
                self._channel.set_timeout(5)
                self._channel.send({"op": "bye"})
                self._channel.receive()
            except OSError as error:
                _log.info("the server could not be told that this island has finished: %s", error)
        self.close()

    def close(self) -> None:
        """End the connection, also while something is on its way."""
        # Before the connection ends, so that the thread does not try again.
        self._closed.set()
        self._disconnect()
        self._pool.shutdown()

    @torch.no_grad()
    def _start(self, number: int, place: Any = None) -> None:
        parts, there = [], []
        for held in self._fragments[number]:
            now = held.now()
            there.append(now)
            if not now.isfinite().all():
                raise NonFiniteError(
                    "LP703",
                    f"the weight {held.region.name} has NaN or infinite entries after "
                    f"{self._own_steps} steps of island {self._place.island}, so its update was "
                    "not sent. Restart the island, which loads the weights from the server. If "
                    "this happens again, use a lower learning rate.",
                )
            # Other ranks of the island hold the same box, and one of them sends it.
            if held.region.sends:
                moved = held.start() - now
                # What encoding left out of earlier movements; see Note [Two copies] for the way
                # back.
                moved = moved if held.owed is None else moved.add_(held.owed)
                coded = encode(moved, self._outer.quantize)
                if self._outer.quantize != "none":
                    held.owed = moved - coded.values(moved.dtype)
                parts.append(coded.pack(held.region.alone))
        header = {
            "op": "move",
            "fragment": number,
            # The same on all ranks of the island, which count the same steps.
            "ticket": f"{self._place.incarnation}-{self._own_steps}",
            "base": self._versions[number],
            "samples": self._samples - self._samples_before[number],
            "step": self.step,
            "place": place,
            "pace": round(1e6 * self._spent / max(1, self._own_steps - self._paced_at)),
        }
        self._spent, self._paced_at = 0.0, self._own_steps
        # Samples since this fragment left last: what the movement was learned from.
        self._samples_before[number] = self._samples
        self._left_at[number] = self._own_steps
        # In the thread, as `overlap` steps may run meanwhile.
        answer = self._pool.submit(self._deliver, header, b"".join(parts))
        self._flight = _Flight(number, self._own_steps, there, answer)

    @torch.no_grad()
    def _finish(self) -> None:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        began, waited = time.monotonic(), self.waited
        header, payload = flight.answer.result()
        self.waited += time.monotonic() - began
        parts = self._fragments[flight.number]
        whole = header["whole"]
        kind = "none" if whole else self._outer.quantize
        new = read_regions(memoryview(payload), [held.region for held in parts], kind, alone=False)
        for held, values, before in zip(parts, new, flight.there, strict=True):
            # The server sends the weights where this island's base is not that of the update.
            held.base = values if whole else held.base.add_(values)
            # And what was learned meanwhile; without overlap that is 0.
            held.values.copy_(held.base + (held.now() - before))
        # The next movement says from which version it starts; see Note [Versions] in
        # `meeting.py`.
        version, base = (header["era"], header["version"]), self._versions[flight.number]
        self._versions[flight.number] = version
        self.step = max(self.step, header["step"])
        self._exchanges.append(
            Exchange(
                step=flight.step,
                fragment=flight.number,
                islands=header["islands"],
                late=header["late"],
                movements=[Movement(*seen) for seen in header["movements"]],
                waited=self.waited - waited,
                staleness=version[1] - base[1] - 1 if version[0] == base[0] else 0,
            )
        )
        self._share = header["share"]
        # Counted from where the movement left, so that a late answer does not shift all later
        # ones.
        self._next = max(self._own_steps + 1, flight.step + self._stride)

    def _deliver(self, header: dict[str, Any], payload: bytes) -> Answer:
        """Send a movement until it is answered; see Note [Tickets]."""

        def exchange() -> Answer:
            era, channel = header["base"][0], self._channel
            # The connection was lost: the ticket tells the server which answer is still owed.
            if channel is None:
                welcome, values = self._connect((header["fragment"], header["ticket"]))
                number, era = header["fragment"], welcome["era"]
                # It was merged, and only the answer was lost: the welcome has brought the
                # weights.
                if welcome["counted"][number] == header["ticket"]:
                    answer = {"version": welcome["versions"][number], "era": era}
                    about = {"step": welcome["step"], "islands": [], "late": [], "movements": []}
                    about["share"] = welcome["shares"][number]
                    return {**answer, **about, "whole": True}, values
                channel = self._channel
            if channel is None:
                raise ConnectionError("closed")
            channel.set_timeout(self._outer.timeout)
            channel.send(header, payload)
            answer, values = channel.receive(self._limit())
            self._check(answer)
            return {**answer, "era": era}, values

        return self._try(exchange)

    def _try(self, exchange: Callable[[], Answer]) -> Answer:
        """Return what the server answers; while it is away, try again."""
        end, is_said = time.monotonic() + self._outer.timeout, False
        while True:
            try:
                answer: Answer = exchange()
            # OSError covers connections, time limits and MessageError; others end the run.
            except OSError as error:
                self._disconnect()
                left = end - time.monotonic()
                # A certificate that is wrong now is wrong in a second.
                hopeless = self._closed.is_set() or isinstance(error, ssl.SSLCertVerificationError)
                if left <= 0 or hopeless:
                    raise IslandError(
                        "LP701",
                        f"island {self._place.island} could not reach its server at "
                        f"{self._place.server} (timeout={self._outer.timeout:g} s): {error}. Start "
                        "lightning-par serve there, open its port, and set LIGHTNING_PAR_KEY to "
                        "its key. Then start the island again: it loads the server's weights.",
                    ) from error
                if not is_said:
                    is_said = True
                    _log.warning(
                        "island %d rank %d cannot reach the server at %s (%s); trying %.0f s more",
                        *(self._place.island, self._place.rank, self._place.server, error, left),
                    )
                # Not sleep: `close` ends the wait. Random: ranks do not come back all at once.
                self._closed.wait(min(left, _RETRY * (1 + random.random())))
            except BaseException:
                self._disconnect()
                raise
            else:
                if is_said:
                    _log.warning("island %d reaches the server again", self._place.island)
                return answer

    def _connect(self, pending: tuple[int, str] | None) -> Answer:
        """Introduce this rank, and give the model if it is asked for; return the welcome."""
        host, _, port = self._place.server.rpartition(":")
        certificates = self._outer.ca_file
        # First: where they cannot be read, a connection would stay open.
        context = certificates and ssl.create_default_context(cafile=certificates)
        connection = socket.create_connection((host, int(port)), timeout=10)
        if context:
            connection = context.wrap_socket(connection, server_hostname=host)
        channel = self._channel = Channel(connection, self._place.key, is_server=False)
        # `close` may have run between the connection and its channel, and would not see it.
        if self._closed.is_set():  # `close` came while this connected
            raise ConnectionError("closed")
        channel.set_timeout(self._outer.timeout)
        regions = [held.region for held in self._held]
        hello = Hello(
            island=self._place.island,
            rank=self._place.rank,
            world=self._place.world,
            incarnation=self._place.incarnation,
            outer=self._outer.agreement(),
            regions=regions,
            pending=pending,
        )
        channel.send(hello.header())
        answer, payload = channel.receive(self._limit())
        # The first island of a run gives the model; each of its ranks the boxes that it sends.
        if answer["op"] == "seed":
            seeds = [h for h in self._held if h.region.sends]
            packed = (encode(h.base, "none").pack(h.region.alone) for h in seeds)
            channel.send({"op": "seed", "step": self.step}, b"".join(packed))
            answer, payload = channel.receive(self._limit())
        self._check(answer)
        if answer["op"] != "welcome":
            raise MessageError(f"the server answered {answer['op']!r}, not 'welcome'")
        return answer, payload

    def _check(self, answer: dict[str, Any]) -> None:
        if answer["op"] == "refused":
            said = f"the server {self._place.server} refused this island: {answer['reason']} "
            raise IslandError("LP702", said + _CURE)

    def _limit(self) -> int:
        """Return the bytes of the longest answer: 8 for an entry in any encoding, 16 for scales."""
        return sum(torch.Size(h.region.size).numel() * 8 + 16 for h in self._held)

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._bytes[0] += channel.sent
            self._bytes[1] += channel.received
            channel.close()


def _hold(piece: Piece, sends: frozenset[Box], trained: frozenset[str]) -> _Held:
    # Movements are differences of nearly equal numbers, which 16 bits would lose.
    wide = torch.float64 if piece.values.dtype is torch.float64 else torch.float32
    region = Region(
        name=piece.box.name,
        offset=piece.box.offset,
        size=piece.box.shape,
        shape=piece.global_shape,
        dtype=str(wide).removeprefix("torch."),
        sends=piece.box in sends,
        trains=piece.box.name in trained,
    )
    return _Held(region, piece.values, piece.values.detach().to("cpu", wide, copy=True))
