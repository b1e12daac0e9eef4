"""Zero-bubble schedules: the backward is split, weights' gradients fill the bubble.

F is a forward, I the gradient of a stage's input, W those of its weights; T_F, T_I and T_W are
their times. p is the number of ranks, m the number of micro-batches. Sizes of the bubble are those
of the longest span of a rank, from its own first action to its own last (`Simulation.span_bubble`).

**Source**: Qi et al. 2401.10241, "Zero Bubble Pipeline Parallelism" (ZB-H1 and ZB-H2, section 2.1;
their B is our I), and Qi et al. 2405.15362, "Pipeline Parallelism with Controllable Memory" (the
V-shape).
"""

from collections import Counter

from lightning_par.engine.pipeline.actions import Action, ActionKind, count_problems, Schedule
from lightning_par.errors import raise_problems, ScheduleError

__all__ = ["check_counts", "zb_h1", "zb_h2", "zbv"]

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


class _Row:
    """The actions of one rank, appended kind by kind; a micro-batch's number is its turn.

    Args:
        stages: Stages of the rank, one per chunk.
        num_microbatches: Number of actions of each kind; further ones are not appended.
    """

    def __init__(self, stages: tuple[int, ...], num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._stages, self._microbatches = stages, num_microbatches
        self._count: Counter[tuple[ActionKind, int]] = Counter()

    def run(self, *kinds: ActionKind, chunk: int = 0) -> None:
        """Append the next action of each kind."""
        for kind in kinds:
            turn = self._count[kind, chunk]
            if turn < self._microbatches:
                self.actions.append(Action(self._stages[chunk], kind, turn))
                self._count[kind, chunk] += 1

    def left(self, kind: ActionKind, chunk: int = 0) -> int:
        """Return how many actions of a kind are still to come."""
        return self._microbatches - self._count[kind, chunk]

    def waiting(self, chunk: int = 0) -> int:
        """Return how many weights' gradients could be computed now."""
        return self._count[_I, chunk] - self._count[_W, chunk]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1: the memory of 1F1B, and a third of its bubble.

    The bubble has the size (p - 1) (T_F + T_I - T_W); no stage holds more than p micro-batches.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.
    """
    return _handcrafted("zb-h1", num_ranks, num_microbatches, warm_up=1, delay=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H2: no bubble if T_F = T_I = T_W, for about twice the memory of 1F1B.

    The bubble has the size (p - 1) (T_F + T_I - 2 T_W); a stage holds up to 2p - 1 micro-batches.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; the bubble is that small from 2p - 1 on.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.
    """
    return _handcrafted("zb-h2", num_ranks, num_microbatches, warm_up=2, delay=2)


def _handcrafted(
    name: str, num_ranks: int, num_microbatches: int, *, warm_up: int, delay: int
) -> Schedule:
    """Order stage s: `warm_up` (p - 1 - s) + 1 forwards, then I and F in turn; W stays `delay` s
    micro-batches behind I.
    """
    check_counts(name, num_ranks, num_microbatches)
    rows = []
    for stage in range(num_ranks):
        row = _Row((stage,), num_microbatches)
        for _ in range(warm_up * (num_ranks - 1 - stage)):
            row.run(_F)
        while row.left(_I):
            # The later the stage, the shorter its warm-up.
            row.run(_F, _I)
            # The later the stage, the longer its W waits: the stages before it wait for its I.
            if row.waiting() > delay * stage:
                row.run(_W)
        while row.left(_W):
            row.run(_W)
        rows.append(tuple(row.actions))
    return Schedule(
        name=name,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(rows),
        rank_of_stage=tuple(range(num_ranks)),
    )


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-V: two stages per rank in the shape of a V, no bubble at the memory of 1F1B.

    Rank r holds the stages r and 2p - 1 - r, so that rank 0 holds both ends of the model. From
    m = 2p on, if T_F = T_I = T_W and messages take no time, the bubble is zero; a rank holds up to
    2p halves of a micro-batch.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; below 2p there are bubbles.

    Raises:
        ScheduleError: p or m is less than 1.
    """
    check_counts("zbv", num_ranks, num_microbatches)
    stages = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    # The order below needs 2 p micro-batches; with fewer, those that are not there are left out.
    enough = max(num_microbatches, 2 * num_ranks)
    whole = Schedule(
        name="zbv",
        num_stages=2 * num_ranks,
        num_microbatches=enough,
        actions=tuple(tuple(_v_row(rank, num_ranks, enough)) for rank in range(num_ranks)),
        rank_of_stage=(*range(num_ranks), *reversed(range(num_ranks))),
    )
    assert [whole.stages_of_rank(rank) for rank in range(num_ranks)] == stages
    return whole.first(num_microbatches)


def _v_row(rank: int, p: int, m: int) -> list[Action]:
    """Order one rank; chunk 0 is on the way down the V, chunk 1 on the way up. m is 2p or more."""
    row = _Row((rank, 2 * p - 1 - rank), m)
    # Down the V and up again to this rank: 2 (p - rank) - 1 stages.
    for _ in range(2 * (p - rank) - 1):  # until the first micro-batch is back from the turn
        row.run(_F)
    for _ in range(rank):
        row.run(_F, chunk=1)
        row.run(_F)
    for _ in range(p - rank):
        row.run(_F, _I, _W, chunk=1)
    while row.left(_F, chunk=1):
        row.run(_F, _I, _W)
        row.run(_F, _I, _W, chunk=1)
    for _ in range(rank):  # what is left for weights fills the wait for the last gradients
        row.run(_I)
        row.run(_I, chunk=1)
    while row.left(_I):
        row.run(_I, _W)
    # What is left of W: chunk 1 first, as its inputs were complete first.
    for chunk in (1, 0):
        while row.left(_W, chunk):
            row.run(_W, chunk=chunk)
    return row.actions


def check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise if a schedule of this name cannot have such numbers."""
    problems = count_problems(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    raise_problems(ScheduleError, "LP402", problems)
