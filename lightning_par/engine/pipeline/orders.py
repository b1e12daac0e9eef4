"""Orders that several schedules share: rounds of micro-batches, turns, split backwards.

p is the number of ranks, m the number of micro-batches, v the number of stages per rank.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_par.engine.pipeline.actions import Action, ActionKind, count_problems, Schedule
from lightning_par.errors import raise_problems, ScheduleError

__all__ = [
    "alternate",
    "check_counts",
    "check_stages_per_rank",
    "order_rounds",
    "split_backwards",
]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD


def order_rounds(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    order: Callable[[int, Sequence[Action], Sequence[Action]], Sequence[Action]],
    *,
    stages_per_rank: int = 1,
) -> Schedule:
    """Return a schedule with the stages r, r + p, ..., r + (v - 1) p on rank r.

    It is made for the next multiple of p micro-batches, and leaves out those that are not there.

    Args:
        name: Of the schedule.
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        order: Orders the actions of a rank, of which it gets the number, all forwards and all
            backwards: p micro-batches pass all stages of the rank before the next p begin.
        stages_per_rank: v.

    Raises:
        ScheduleError: p or m is less than 1.
    """
    p, v = num_ranks, stages_per_rank
    check_counts(name, p, num_microbatches)
    rounds = range(-(-num_microbatches // p))
    rows = []
    for rank in range(p):
        forwards, backwards = (
            [
                Action(chunk * p + rank, kind, start * p + i)
                for start in rounds
                for chunk in chunks
                for i in range(p)
            ]
            for kind, chunks in ((_F, range(v)), (_B, range(v)[::-1]))
        )
        rows.append(tuple(order(rank, forwards, backwards)))
    whole = Schedule(
        name=name,
        num_stages=p * v,
        num_microbatches=len(rounds) * p,
        actions=tuple(rows),
        rank_of_stage=tuple(range(p)) * v,
    )
    return whole.first(num_microbatches)


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    """Order a warm-up of forwards, then a forward and a backward in turn, then what is left."""
    # Fewer micro-batches than the warm-up wants: all forwards, then all backwards.
    warm_up = min(warm_up, len(forwards))
    # As many pairs as forwards are left; the backwards of the warm-up come at the end.
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(a for pair in pairs for a in pair), *backwards[steady:]]


def split_backwards(row: Sequence[Action], delay: int) -> list[Action]:
    """Split every backward in two halves; weights' gradients wait for `delay` further backwards."""
    split, waiting = list[Action](), deque[Action]()
    for action in row:
        if action.kind is not _B:
            split.append(action)
            continue
        split.append(replace(action, kind=ActionKind.BACKWARD_INPUT))
        waiting.append(replace(action, kind=ActionKind.BACKWARD_WEIGHT))
        if len(waiting) > delay:
            split.append(waiting.popleft())
    return [*split, *waiting]


def check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise if a schedule of this name cannot have such numbers."""
    problems = count_problems(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    raise_problems(ScheduleError, "LP402", problems)


def check_stages_per_rank(name: str, stages_per_rank: int, *, flat: str) -> None:
    """Raise if an interleaved schedule is to have one stage per rank, as that named `flat`."""
    if stages_per_rank < 2:
        raise ScheduleError(
            "LP402",
            f"the schedule {name!r} needs 2 or more stages per rank, but "
            f"stages_per_rank={stages_per_rank}. Use stages_per_rank=2 or more; for one stage per "
            f"rank use the schedule {flat!r}.",
        )
