"""The schedule of a ring, as data: who attends to what, who sends what, how much."""

import itertools

import pytest

from lightning_par.engine.context.ring_schedule import (
    join_intervals,
    places_in,
    ring_steps,
    RingSchedule,
    TokenLayout,
    Transfer,
)
from lightning_par.errors import ConfigurationError

DOCUMENTS = {"one": (), "packed": (0, 5, 5, 6, 17, 37), "short": (0, 36, 37)}


def schedules(ring: int, length: int = 37) -> list[RingSchedule]:
    found = []
    for zigzag, causal, route in itertools.product(
        (True, False), (True, False), ("direct", "ring")
    ):
        layout = TokenLayout(length=length, ring=ring, zigzag=zigzag)
        bounds = DOCUMENTS.values() if length == 37 else [()]
        windows = (None, (0, 0), (4, 2), (40, 3))
        found += [
            RingSchedule(layout=layout, causal=causal, documents=d, route=route, window=w)
            for d in bounds
            for w in windows
        ]
    return found


def tokens(layout: TokenLayout, member: int) -> list[int]:
    return [t for a, b in layout.of_member(member) for t in range(a, b)]


def pairs_of(schedule: RingSchedule) -> list[tuple[int, int]]:
    """Every pair of tokens that some block attends to."""
    found = []
    for member in range(schedule.layout.ring):
        mine = tokens(schedule.layout, member)
        for step in ring_steps(schedule, member):
            theirs = tokens(schedule.layout, step.owner)
            for block in step.blocks:
                assert block.queries[0] < block.queries[1]
                assert block.keys[0] < block.keys[1]
                for i in range(*block.queries):
                    stop = block.keys[1]
                    if block.causal:
                        assert step.owner == member
                        assert block.queries == block.keys
                        stop = i + 1
                    keys = range(block.keys[0], stop)
                    if block.band is not None:
                        low, high = block.band
                        ahead = i - block.queries[0] + block.keys[0]
                        keys = [j for j in keys if low <= ahead - j < high]
                    found += [(mine[i], theirs[j]) for j in keys]
    return found


def wanted_pairs(schedule: RingSchedule) -> list[tuple[int, int]]:
    bounds = schedule.documents
    return [
        (q, k)
        for low, high in itertools.pairwise(bounds)
        for q in range(low, high)
        for k in range(low, q + 1 if schedule.causal else high)
        if schedule.window is None or -schedule.window[1] <= q - k <= schedule.window[0]
    ]


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_every_visible_pair_is_attended_once(ring: int) -> None:
    for length in (37, 16, 3):  # neither divides, divides, fewer tokens than members
        for schedule in schedules(ring, length):
            assert sorted(pairs_of(schedule)) == wanted_pairs(schedule), schedule


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_what_is_sent_is_what_is_received_and_held(ring: int) -> None:
    for schedule in schedules(ring):
        steps = [ring_steps(schedule, member) for member in range(ring)]
        for index in range(ring):
            for kind in ("", "_gradients"):
                sent = {
                    (m, t.peer, t.owner, t.intervals)
                    for m in range(ring)
                    if (t := getattr(steps[m][index], "send" + kind)) is not None
                }
                received = {
                    (t.peer, m, t.owner, t.intervals)
                    for m in range(ring)
                    if (t := getattr(steps[m][index], "receive" + kind)) is not None
                }
                assert sent == received
        for member in range(ring):
            held = {member: ((0, schedule.layout.padded // ring),)}
            for step in steps[member][1:]:
                if step.send is not None:
                    places_in(step.send.intervals, held[step.send.owner])
                if step.receive is not None:
                    held[step.receive.owner] = step.receive.intervals
                places_in(step.needs, held.get(step.owner, ()))


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_gradients_of_all_readers_come_home(ring: int) -> None:
    for schedule in schedules(ring):
        for owner in range(ring):
            home = [
                t.intervals
                for step in ring_steps(schedule, owner)
                if (t := step.receive_gradients) is not None and t.owner == owner
            ]
            needed = [
                step.needs
                for reader in range(ring)
                for step in ring_steps(schedule, reader)
                if step.owner == owner and reader != owner
            ]
            assert join_intervals(i for h in home for i in h) == join_intervals(
                i for n in needed for i in n
            )


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_bytes_are_those_of_the_formulas(ring: int) -> None:
    """In units of one rank's keys and values, over all ranks; see Note [Direct schedule]."""
    layout = TokenLayout(length=16 * ring, ring=ring)
    for causal, forward, gradients in ((True, 0.75, 0.75), (False, 1, 1)):
        schedule = RingSchedule(layout=layout, causal=causal)
        sent = [schedule.tokens_sent(member) for member in range(ring)]
        assert sum(v for v, _ in sent) == forward * (ring - 1) * ring * layout.local
        assert sum(g for _, g in sent) == gradients * (ring - 1) * ring * layout.local


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_zigzag_gives_every_member_the_same_work(ring: int) -> None:
    layout = TokenLayout(length=16 * ring, ring=ring)
    schedule = RingSchedule(layout=layout, causal=True)
    work = []
    for member in range(ring):
        blocks = [b for step in ring_steps(schedule, member) for b in step.blocks]
        sizes = [(b.queries[1] - b.queries[0], b.keys[1] - b.keys[0], b.causal) for b in blocks]
        work.append(sum(q * (k + 1) / 2 if causal else q * k for q, k, causal in sizes))
        assert len(blocks) == ring
    assert len(set(work)) == 1


def test_packed_documents_send_only_what_is_needed() -> None:
    """Documents that end where ranks' tokens end need nobody; one that crosses sends its part."""
    layout = TokenLayout(length=24, ring=2, zigzag=False)
    apart = RingSchedule(layout=layout, causal=True, documents=(0, 12, 24))
    assert [apart.tokens_sent(m) for m in range(2)] == [(0, 0), (0, 0)]
    across = RingSchedule(layout=layout, causal=True, documents=(0, 9, 14, 24))
    assert [across.tokens_sent(m) for m in range(2)] == [(3, 0), (0, 3)]
    step = ring_steps(across, 1)[1]
    assert step.receive == Transfer(peer=0, owner=0, intervals=((9, 12),))


@pytest.mark.parametrize(("length", "divisor"), [(37, 1), (37, 3), (3, 1), (16, 2)])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 4), (2, 2), (4, 1), (3, 2)])
def test_ranks_share_all_tokens_evenly(length: int, divisor: int, ring: int, ulysses: int) -> None:
    for zigzag in (True, False):
        layout = TokenLayout(
            length=length, ring=ring, ulysses=ulysses, zigzag=zigzag, divisor=divisor
        )
        held = [
            [t for a, b in layout.of_rank(rank) for t in range(a, b)]
            for rank in range(layout.ranks)
        ]
        assert {len(h) for h in held} == {layout.local}
        assert layout.local % divisor == 0
        assert sorted(t for h in held for t in h) == list(range(layout.padded))
        assert length <= layout.padded < length + 2 * layout.ranks * ring * divisor
        for member in range(ring):
            ranks = held[member * ulysses : (member + 1) * ulysses]
            assert [t for h in ranks for t in h] == tokens(layout, member)


@pytest.mark.parametrize("bounds", [(0, 30), (1, 37), (0, 9, 5, 37)])
def test_documents_that_do_not_cover_the_sequence_are_refused(bounds: tuple[int, ...]) -> None:
    layout = TokenLayout(length=37, ring=2)
    with pytest.raises(ConfigurationError, match=r"cu_seqlens=\[.*must increase from 0 to 37"):
        RingSchedule(layout=layout, causal=True, documents=bounds)


def test_only_what_a_window_reaches_is_sent() -> None:
    layout = TokenLayout(length=64, ring=4, zigzag=False)
    near = RingSchedule(layout=layout, causal=True, window=(5, 0))
    assert [near.tokens_sent(m) for m in range(4)] == [(5, 0), (5, 5), (5, 5), (0, 5)]
    both = RingSchedule(layout=layout, causal=False, window=(5, 2))
    assert [both.tokens_sent(m)[0] for m in range(4)] == [5, 7, 7, 2]
    assert RingSchedule(layout=layout, causal=True, window=(63, 0)).window is None
    with pytest.raises(ConfigurationError, match="two numbers of 0 or more"):
        RingSchedule(layout=layout, causal=True, window=(-1, 0))
