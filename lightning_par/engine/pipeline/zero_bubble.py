"""Zero-bubble schedules: the backward is split, weights' gradients fill the bubble.

F is a forward, I the gradient of a stage's input, W those of its weights; T_F, T_I and T_W are
their times. p is the number of ranks, m the number of micro-batches. Sizes of the bubble are those
of the longest span of a rank, from its own first action to its own last (`Simulation.span_bubble`).

**Source**: Qi et al. 2401.10241, "Zero Bubble Pipeline Parallelism" (ZB-H1 and ZB-H2, section 2.1;
their B is our I), and Qi et al. 2405.15362, "Pipeline Parallelism with Controllable Memory" (the
V-shape).
"""

from collections import Counter
from collections.abc import Callable

from lightning_par.engine.pipeline.actions import Action, ActionKind, Schedule
from lightning_par.engine.pipeline.orders import (
    alternate,
    check_counts,
    check_stages_per_rank,
    order_rounds,
    split_backwards,
)

__all__ = ["dualpipev", "further_in_flight", "interleaved_zb", "zb_h1", "zb_h2", "zbv"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


class _Row:
    """The actions of one rank, appended kind by kind; a micro-batch's number is its turn.

    Args:
        stages: Stages of the rank, one per chunk.
        num_microbatches: Number of actions of each kind; further ones are not appended.

    Attributes:
        waiting: The chunk of every I whose W is still to come, the oldest first.
    """

    def __init__(self, stages: tuple[int, ...], num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._stages, self._microbatches = stages, num_microbatches
        self._count: Counter[tuple[ActionKind, int]] = Counter()
        self.waiting: list[int] = []

    def run(self, *kinds: ActionKind, chunk: int = 0) -> None:
        """Append the next action of each kind."""
        for kind in kinds:
            halves = (_I, _W) if kind is _B else (kind,)
            turn = self._count[halves[0], chunk]
            if turn < self._microbatches:
                self.actions.append(Action(self._stages[chunk], kind, turn))
                self._count.update((half, chunk) for half in halves)
                if kind is _I:
                    self.waiting.append(chunk)
                elif kind is _W:
                    self.waiting.remove(chunk)

    def run_weights(self) -> None:
        """Append the weights' gradients that wait longest."""
        self.run(_W, chunk=self.waiting[0])

    def left(self, kind: ActionKind, chunk: int = 0) -> int:
        """Return how many actions of a kind are still to come."""
        return self._microbatches - self._count[kind, chunk]


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
    # The later the stage, the shorter its warm-up, and the longer its W waits: the stages before it
    # wait for its I.
    return order_rounds(
        name,
        num_ranks,
        num_microbatches,
        lambda stage, f, b: split_backwards(
            alternate(f, b, warm_up * (num_ranks - 1 - stage)), delay * stage
        ),
    )


def interleaved_zb(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule with a split backward: W fills the bubble.

    With T_F, T_I and T_W of all stages of a rank, T_W at most T_I, and m a multiple of p and at
    least 2p, the bubble has the size ((p - 1) (T_F + T_I - T_W) - e T_W) / v or 0, whichever is
    larger, with e the smaller of p - 1 and p // 2 + 1; with m = p it has the size
    (p - 1) (T_F + T_I - T_W) / v. No rank holds more micro-batches of all its stages than the first
    one of interleaved 1F1B, p + (p - 1) / v.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1. If p does not divide it, the last round has gaps.
        stages_per_rank: v, at least 2.

    Returns:
        A schedule with the stages r, r + p, ..., r + (v - 1) p on rank r.

    Raises:
        ScheduleError: A count is too small.
    """
    p, v = num_ranks, stages_per_rank
    check_stages_per_rank("interleaved-zb", v, flat="zb-h1")
    # ZB-H1 for the ranks far from an end of the pipeline, ZB-H2 for those near it: with ZB-H2 for
    # all, the last rank would run the forwards of the second round after rank 0 needs them.
    several = num_microbatches > p

    def steps(hops: int) -> int:
        return hops + several * further_in_flight(hops, p)

    return order_rounds(
        "interleaved-zb",
        p,
        num_microbatches,
        lambda rank, f, b: split_backwards(
            alternate(f, b, (v - 1) * p + steps(p - 1 - rank)), steps(rank)
        ),
        stages_per_rank=v,
    )


def further_in_flight(hops: int, num_ranks: int) -> int:
    """Return how many more actions `interleaved_zb` runs ahead, or delays, than ZB-H1 would.

    Args:
        hops: Ranks up to the last one, for forwards that run ahead; up to the first one, for W.
        num_ranks: p.
    """
    return min(hops, num_ranks // 2 + 1)


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
    return _in_v_shape("zbv", num_ranks, num_microbatches, _v_row)


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV: two stages per rank in the shape of a V, a forward with each backward.

    DualPipe cut in half: while one stage of a rank runs a forward, the other runs a whole backward,
    so that each can communicate while the other computes. A rank runs one action at a time here,
    and the two one after the other. With T_F, T_I and T_W of both stages, T_W at most T_F, and m at
    least 2p, the bubble has the size (p - 1) (T_F + T_I - T_W) / 2, or, if that is larger,
    ((p - 1) (2 T_I - T_W) - T_F) / 2: that of ZB-V or more. Only 2p - 1 - r of the 2m backwards of
    rank r are split, so that few gradients of weights wait. A rank holds up to 2p + 1 halves of a
    micro-batch.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; below 2p there are more bubbles.

    Returns:
        A schedule with the stages r and 2p - 1 - r on rank r.

    Raises:
        ScheduleError: p or m is less than 1.

    Source:
        DeepSeek-AI 2412.19437, "DeepSeek-V3 Technical Report", section 3.2.1 (DualPipe), and its
        program github.com/deepseek-ai/DualPipe, which needs m of 2p or more.
    """
    return _in_v_shape("dualpipev", num_ranks, num_microbatches, _dual_row)


def _in_v_shape(
    name: str, num_ranks: int, num_microbatches: int, order: Callable[[int, int, int], list[Action]]
) -> Schedule:
    """Return the schedule whose row of a rank is `order` of the rank, p and 2p or more
    micro-batches; those that are not there are left out.
    """
    check_counts(name, num_ranks, num_microbatches)
    enough = max(num_microbatches, 2 * num_ranks)
    whole = Schedule(
        name=name,
        num_stages=2 * num_ranks,
        num_microbatches=enough,
        actions=tuple(tuple(order(rank, num_ranks, enough)) for rank in range(num_ranks)),
        rank_of_stage=(*range(num_ranks), *reversed(range(num_ranks))),
    )
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


def _dual_row(rank: int, p: int, m: int) -> list[Action]:
    """Order one rank; chunk 0 is on the way down the V, chunk 1 on the way up. m is 2p or more."""
    row = _Row((rank, 2 * p - 1 - rank), m)
    later = p - 1 - rank
    for _ in range(2 * later):
        row.run(_F)
    for _ in range(rank + 1):
        row.run(_F)
        row.run(_F, chunk=1)
    for _ in range(later):  # I first: the earlier stage waits for it
        row.run(_I, _W, _F, chunk=1)
    for _ in range(m - 2 * p + rank + 1):  # each forward with the backward of the other chunk
        row.run(_F)
        row.run(_B, _F, chunk=1)
        row.run(_B)
    for _ in range(later):
        row.run(_B, _F, chunk=1)
        row.run(_B)
    for n in range(2 * (rank + 1)):  # W of the second half fills the wait for the last gradients
        row.run(_B if n <= rank else _I, chunk=1 - n % 2)
    for _ in range(later):
        row.run_weights()
        row.run(_I)
    while row.waiting:
        row.run_weights()
    return row.actions
