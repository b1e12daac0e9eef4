"""When ranks are found to wait for each other in different places."""

from dataclasses import replace

from lightning_par.engine.activity import ActivityRecord
from lightning_par.strategies.processes.rank_status import RankState, RankStatus
from lightning_par.strategies.processes.waiting_place import RanksApart

HERE = RankState(
    rank=0,
    pid=1,
    status=RankStatus.RUNNING,
    when=0.0,
    fault="save (train.py:3)",
    is_alive=True,
    is_stopped=False,
    activity=ActivityRecord(since=0.0, stage=-1, step=3, micro_batch=-1, action="hook"),
)
THERE = replace(HERE, rank=1, fault="advance (loop.py:9)")


def looks(apart: RanksApart, times: list[float], **others: object) -> list[bool]:
    return [
        bool(apart.look([replace(HERE, when=t), replace(THERE, when=t, **others)])) for t in times
    ]


def test_ranks_that_say_other_places_again_and_again_are_apart() -> None:
    assert looks(RanksApart(), [0, 4, 8, 12]) == [False, False, False, True]


def test_what_a_rank_said_once_proves_nothing() -> None:
    apart = RanksApart()
    for now in range(0, 80, 4):
        assert not apart.look([replace(HERE, when=now), THERE])


def test_ranks_in_one_place_or_at_work_wait_for_nobody() -> None:
    assert not any(looks(RanksApart(), [0, 4, 8, 12, 16], fault=HERE.fault))
    assert not any(looks(RanksApart(), [0, 4, 8, 12, 16], fault=""))
    assert not any(looks(RanksApart(), [0, 4, 8, 12, 16], is_stopped=True))


def test_a_rank_that_goes_on_in_between_begins_the_count_anew() -> None:
    apart = RanksApart()
    assert looks(apart, [0, 4, 8])[-1] is False
    assert looks(apart, [12], fault="") == [False]
    assert looks(apart, [16, 20, 24, 28]) == [False, False, False, True]
