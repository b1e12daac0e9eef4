"""Ring schedules: context-parallel attention as data, which keys and values are sent to whom.

T tokens are padded to T' and distributed over the ranks of a ring. A *place* is the index of a
token among those that a rank holds; an interval (a, b) means a .. b - 1. Nothing here touches a
tensor, so that the same values run the attention, count its bytes and draw its picture.

Note [Zigzag]: under a causal mask the last tokens attend to everything and the first to nothing, so
contiguous shares are unequal work. Cut into 2N chunks of which rank r holds numbers r and
2N - 1 - r, every rank has the same work: chunk r of rank r is needed by all others, chunk
2N - 1 - r only by lower ranks.

Note [Direct schedule]: at step s, rank r receives from rank r - s what it needs of that rank's keys
and values, and no more, and sends their gradient straight home, where it is added in the order of
the steps. The neighbor ring hands everything to rank r + 1 instead, which is for machines that
share one network card; a gradient then grows from rank to rank on its way home.

**Source**: Liu et al. 2310.01889 (ring attention); Brandon et al. 2311.09431 (balanced causal
chunks); the direct schedule is ours.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from lightning_par.errors import ConfigurationError

__all__ = [
    "AttentionBlock",
    "Interval",
    "RingSchedule",
    "RingStep",
    "TokenLayout",
    "Transfer",
    "blocks_of",
    "join_intervals",
    "places_in",
    "ring_steps",
]

Interval = tuple[int, int]
_TILE = 128, 1024
"""Fewest and most queries of a block with a window: kernels want some, and a mask of every pair is
made.
"""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Layout of a sequence over the ranks: which tokens every rank holds.

    The sequence is sharded over `ring` members; each member is `ulysses` ranks, which shard the
    member's tokens evenly and exchange them for heads inside attention.
    Rank = member * ulysses + place.

    Attributes:
        length: T, before padding.
        ring: Members of the ring.
        ulysses: Ranks of a member.
        zigzag: Give every member two chunks; see Note [Zigzag].
        divisor: The number of tokens of every rank is padded to a multiple of it.
    """

    length: int
    ring: int
    ulysses: int = 1
    zigzag: bool = True
    divisor: int = 1

    def __post_init__(self) -> None:
        assert min(self.length, self.ring, self.ulysses, self.divisor) >= 1, self

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.ring * self.ulysses

    @property
    def padded(self) -> int:
        """T': the smallest length of 2N equal chunks (N, if contiguous) that all ranks divide."""
        chunks = 2 * self.ring if self.zigzag else self.ring
        # A multiple of the number of chunks, and of what each rank has to hold.
        step = math.lcm(chunks, self.ranks * self.divisor)
        return -(-self.length // step) * step

    @property
    def local(self) -> int:
        """Tokens of one rank, T' / ranks."""
        return self.padded // self.ranks

    def of_member(self, member: int) -> tuple[Interval, ...]:
        """Return the tokens of a member of the ring, in the order in which it holds them."""
        if not self.zigzag:
            size = self.padded // self.ring
            return ((member * size, (member + 1) * size),)
        size, last = self.padded // (2 * self.ring), 2 * self.ring - 1 - member
        chunks = (member * size, (member + 1) * size), (last * size, (last + 1) * size)
        return join_intervals(chunks)

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """Return the tokens of a rank, in the order in which it holds them."""
        # A member's tokens are cut evenly among its ulysses ranks, in the order in which it has
        # them.
        member, place = divmod(rank, self.ulysses)
        start, stop = place * self.local, (place + 1) * self.local
        found, at = [], 0
        for a, b in self.of_member(member):
            low, high = max(start, at), min(stop, at + b - a)
            if low < high:
                found.append((a + low - at, a + high - at))
            at += b - a
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """One call of a kernel: queries that attend to keys.

    Attributes:
        queries: Places among the tokens of the member that computes.
        keys: Places among the tokens of the member that owns the keys.
        causal: Queries and keys are the same tokens, and each attends to itself and those before.
        band: (a, b): query i of the block attends to those keys j of it for which a <= i - j < b;
            None: to all. Never of a causal block.
    """

    queries: Interval
    keys: Interval
    causal: bool
    band: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One message.

    Attributes:
        peer: Member at the other end.
        owner: Member whose keys and values (or their gradients) travel.
        intervals: Places of the owner that are sent, in rising order.
    """

    peer: int
    owner: int
    intervals: tuple[Interval, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens that travel."""
        return sum(b - a for a, b in self.intervals)


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """One step of one member.

    Attributes:
        owner: Whose keys and values it attends to.
        blocks: Calls of the kernel.
        needs: Places of the owner that the blocks read.
        send: Keys and values that leave before the member computes the step ahead of this one.
        receive: Those that have to be here for `blocks`.
        send_gradients: Gradients of keys and values that leave after the blocks' backward.
        receive_gradients: Gradients that arrive in return.
    """

    owner: int
    blocks: tuple[AttentionBlock, ...]
    needs: tuple[Interval, ...]
    send: Transfer | None = None
    receive: Transfer | None = None
    send_gradients: Transfer | None = None
    receive_gradients: Transfer | None = None


@dataclass(frozen=True, kw_only=True)
class RingSchedule:
    """A whole context-parallel attention: layout, mask and route.

    Attributes:
        layout: Which tokens every rank holds.
        causal: Whether a token attends only to itself and those before it.
        documents: Boundaries 0, ..., T of packed documents, as in ``cu_seqlens``; a token attends
            only within its own. Tokens from the last boundary on are padding: they attend to
            nothing. Empty: one document of T tokens.
        window: (left, right): a token attends to so many tokens before and after itself only; under
            a causal mask to none after. None: to all.
        route: ``"direct"`` or ``"ring"``; see Note [Direct schedule].
    """

    layout: TokenLayout
    causal: bool
    documents: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    route: Literal["direct", "ring"] = "direct"

    def __post_init__(self) -> None:
        bounds = self.documents or (0, self.layout.length)
        falls = any(a > b for a, b in pairwise(bounds))
        if falls or bounds[0] != 0 or bounds[-1] != self.layout.length:
            raise ConfigurationError(
                "LP305",
                f"cu_seqlens={list(bounds)} must increase from 0 to {self.layout.length}, the "
                "number of tokens of the undivided sequence.",
            )
        # Empty documents fall away: equal schedules are one entry of the caches.
        object.__setattr__(self, "documents", tuple(dict.fromkeys(bounds)))
        if self.window is not None:
            if min(self.window) < 0:
                raise ConfigurationError(
                    "LP305",
                    f"window={self.window} must be two numbers of 0 or more: how many tokens to "
                    "the left and to the right a token attends to.",
                )
            left, right = self.window[0], 0 if self.causal else self.window[1]
            farthest = max(b - a for a, b in pairwise(bounds)) - 1
            # A window as wide as the longest document hides nothing: then kernels need no mask.
            hides = left < farthest or (right < farthest and not self.causal)
            object.__setattr__(self, "window", (left, right) if hides else None)

    def tokens_sent(self, member: int) -> tuple[int, int]:
        """Return how many tokens' keys and values, and how many tokens' gradients, a member sends.

        The forward sends the first number, the backward the sum of both. A token is 2 * K * H
        numbers per sample (K key/value heads of H dims).
        """
        steps = ring_steps(self, member)
        values = sum(s.send.tokens for s in steps if s.send is not None)
        gradients = sum(s.send_gradients.tokens for s in steps if s.send_gradients is not None)
        return values, gradients


def join_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals, sorted, with those that touch made one."""
    joined: list[Interval] = []
    for a, b in sorted(i for i in intervals if i[0] < i[1]):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return tuple(joined)


def places_in(inner: Sequence[Interval], outer: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return where the intervals `inner` lie in a buffer that holds those of `outer`, one after
    another.

    Args:
        inner: Each lies inside one of `outer`.
        outer: Disjoint.
    """
    found = []
    for a, b in inner:
        at = 0
        for start, stop in outer:
            if start <= a and b <= stop:
                found.append((at + a - start, at + b - start))
                break
            at += stop - start
        else:
            raise AssertionError(f"{(a, b)} is not inside {outer}")
    return tuple(found)


@lru_cache(maxsize=1024)
def blocks_of(schedule: RingSchedule, member: int, owner: int) -> tuple[AttentionBlock, ...]:
    """Return the calls by which the queries of `member` attend to the keys of `owner`.

    Args:
        schedule: Layout and mask.
        member: Has the queries.
        owner: Has the keys; may be the same.
    """
    bounds, blocks, start = schedule.documents, list[AttentionBlock](), 0
    # Chunk by chunk: the member's tokens are not consecutive under zigzag.
    for a, b in schedule.layout.of_member(member):
        first = bisect_right(bounds, a) - 1
        last = bisect_left(bounds, b)
        for low, high in pairwise(bounds[first : last + 1]):
            segment = max(a, low), min(b, high)
            if schedule.window is not None:
                blocks += _blocks_in_window(schedule, owner, (low, high), segment, start - a)
                continue
            # Under a causal mask: keys before the segment as a rectangle; the segment itself is a
            # square.
            document = low, segment[0] if schedule.causal else high
            queries = start + segment[0] - a, start + segment[1] - a
            blocks += _blocks_of_segment(schedule, owner, document, segment, queries)
        start += b - a
    return _join_blocks(blocks)


def _blocks_of_segment(
    schedule: RingSchedule, owner: int, document: Interval, segment: Interval, queries: Interval
) -> list[AttentionBlock]:
    """Return the blocks of queries that lie in one document and in one chunk.

    Args:
        schedule: Layout and mask.
        owner: Has the keys.
        document: Tokens that all these queries attend to; under a causal mask those before them.
        segment: The tokens of these queries.
        queries: Their places.
    """
    found, start = [], 0
    for c, d in schedule.layout.of_member(owner):
        low, high = max(c, document[0]), min(d, document[1])
        if low < high:
            keys = start + low - c, start + high - c
            found.append(AttentionBlock(queries=queries, keys=keys, causal=False))
        # The square on the diagonal is at the owner of the segment, which is this member itself.
        if schedule.causal and c <= segment[0] < d:
            keys = start + segment[0] - c, start + segment[1] - c
            found.append(AttentionBlock(queries=queries, keys=keys, causal=True))
        start += d - c
    return found


def _blocks_in_window(
    schedule: RingSchedule, owner: int, document: Interval, segment: Interval, offset: int
) -> list[AttentionBlock]:
    """Return the blocks of queries in one document and in one chunk that attend within a window.

    The queries are cut into tiles, so that a block holds few keys that its queries do not see.

    Args:
        schedule: With a window.
        owner: Has the keys.
        document: The tokens of the document.
        segment: The tokens of these queries.
        offset: Place of a query, less its token.
    """
    assert schedule.window is not None
    left, right = schedule.window
    # As wide as the window: a tile of q queries reads q + left + right keys.
    size = min(max(left + right, _TILE[0]), _TILE[1])
    found = []
    for first in range(*segment, size):
        stop = min(first + size, segment[1])
        start = 0
        for c, d in schedule.layout.of_member(owner):
            low, high = max(c, document[0], first - left), min(d, document[1], stop + right)
            if low < high:
                ahead = first - low
                # In places of the block: query i is token first + i, key j is token low + j.
                band = -right - ahead, left + 1 - ahead
                sees_all = band[0] <= low + 1 - high and stop - first <= band[1]
                found.append(
                    AttentionBlock(
                        queries=(first + offset, stop + offset),
                        keys=(start + low - c, start + high - c),
                        causal=False,
                        band=None if sees_all else band,
                    )
                )
            start += d - c
    return found


def _join_blocks(blocks: Sequence[AttentionBlock]) -> tuple[AttentionBlock, ...]:
    """Make fewer calls of the same pairs: joined keys, joined queries, joined causal squares."""
    causal = {b.queries: b for b in blocks if b.causal}
    by_queries: dict[Interval, list[Interval]] = {}
    for block in blocks:
        if not block.causal and block.band is None:
            by_queries.setdefault(block.queries, []).append(block.keys)
    by_keys: dict[Interval, list[Interval]] = {}
    # Twice: queries with the same keys become one block as well.
    for queries, found in by_queries.items():
        for keys in join_intervals(found):
            by_keys.setdefault(keys, []).append(queries)
    full = {(q, k) for k, found in by_keys.items() for q in join_intervals(found)}
    for first, second in pairwise(sorted(causal)):
        # Two causal squares and the rectangle between them are one larger causal square.
        if first in causal and first[1] == second[0] and (second, first) in full:
            full.remove((second, first))
            del causal[first], causal[second]
            whole = first[0], second[1]
            causal[whole] = AttentionBlock(queries=whole, keys=whole, causal=True)
    rest = [AttentionBlock(queries=q, keys=k, causal=False) for q, k in sorted(full)]
    return (*(causal[q] for q in sorted(causal)), *rest, *(b for b in blocks if b.band))


def _needs(schedule: RingSchedule, member: int, owner: int) -> tuple[Interval, ...]:
    return join_intervals(b.keys for b in blocks_of(schedule, member, owner))


def _transfer(peer: int, owner: int, intervals: tuple[Interval, ...]) -> Transfer | None:
    if not intervals:
        return None
    return Transfer(peer=peer, owner=owner, intervals=intervals)


@lru_cache(maxsize=1024)
def ring_steps(schedule: RingSchedule, member: int) -> tuple[RingStep, ...]:
    """Return the steps of a member.

    Args:
        schedule: Layout, mask and route.
        member: Index of the member.
    """
    size = schedule.layout.ring
    own = RingStep(
        owner=member,
        blocks=blocks_of(schedule, member, member),
        needs=_needs(schedule, member, member),
    )
    make = _direct_step if schedule.route == "direct" else _neighbor_step
    return (own, *(make(schedule, member, step) for step in range(1, size)))


def _direct_step(schedule: RingSchedule, member: int, step: int) -> RingStep:
    size = schedule.layout.ring
    # In step s every member receives from s places before it and sends to s places behind it: a
    # permutation, so that each has one send and one receive.
    owner, reader = (member - step) % size, (member + step) % size
    taken, given = _needs(schedule, member, owner), _needs(schedule, reader, member)
    return RingStep(
        owner=owner,
        blocks=blocks_of(schedule, member, owner),
        needs=taken,
        send=_transfer(reader, member, given),
        receive=_transfer(owner, owner, taken),
        send_gradients=_transfer(owner, owner, taken),
        receive_gradients=_transfer(reader, member, given),
    )


def _neighbor_step(schedule: RingSchedule, member: int, step: int) -> RingStep:
    """Return a step of the neighbor ring: keys and values that later members still need move on,
    and the gradients of those that earlier members read are summed on their way.
    """
    size = schedule.layout.ring
    owner, before, after = (member - step) % size, (member - 1) % size, (member + 1) % size

    # Of an owner's keys, those that members from step `first` on will read.
    def still_needed(whose: int, first: int) -> tuple[Interval, ...]:
        readers = ((whose + s) % size for s in range(first, size))
        return join_intervals(i for r in readers for i in _needs(schedule, r, whose))

    def already_read(whose: int, last: int) -> tuple[Interval, ...]:
        readers = ((whose + s) % size for s in range(1, last + 1))
        return join_intervals(i for r in readers for i in _needs(schedule, r, whose))

    # What this member hands on in this step, and whose gradients reach it in return.
    passed, grown = (owner + 1) % size, (owner - 1) % size
    return RingStep(
        owner=owner,
        blocks=blocks_of(schedule, member, owner),
        needs=_needs(schedule, member, owner),
        send=_transfer(after, passed, still_needed(passed, step)),
        receive=_transfer(before, owner, still_needed(owner, step)),
        send_gradients=_transfer(after, owner, already_read(owner, step)),
        receive_gradients=_transfer(before, grown, already_read(grown, step)),
    )
