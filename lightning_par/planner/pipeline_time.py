"""Time of a pipeline's step with the real times of every stage, fast enough for a search.

The order of actions is that of `engine.pipeline.simulator`, which is asked once per schedule; a
walk over that order with other times then is one loop. p is the number of ranks, m that of
micro-batches.
"""

from collections.abc import Sequence
from functools import lru_cache

from lightning_par.engine.pipeline.actions import ActionKind, Schedule
from lightning_par.engine.pipeline.schedules import build_schedule, SCHEDULES
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.engine.pipeline.validation import inputs_of
from lightning_par.planner.part_cost import StageTime
from lightning_par.planner.shapes import Layout

__all__ = ["OrderedSchedule", "order_schedule", "pipeline_seconds", "quick_pipeline"]

_KINDS = list(ActionKind)
_SIMULATED = 256
"""Micro-batches times ranks that are always simulated whole."""


class OrderedSchedule:
    """A schedule as one list of steps, each after those that it waits for.

    Args:
        schedule: One that can run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_ranks = schedule.num_ranks
        timed = [event for row in simulate(schedule).events for event in row]
        # Every action of this simulation takes time, so that one that starts later never comes
        # before what it waits for.
        # Once for a schedule; other times then need no simulation of dependencies.
        order = [event.action for event in sorted(timed, key=lambda event: event.start)]
        index = {action: i for i, action in enumerate(order)}
        owner = schedule.rank_of_stage
        self._steps = [
            (
                owner[action.stage],
                _KINDS.index(action.kind),
                action.stage,
                tuple(
                    (index[source], owner[source.stage] != owner[action.stage])
                    for choices in inputs_of(action, schedule.num_stages)
                    for source in choices
                    # Of an input gradient B or I exists, not both.
                    if source in index
                ),
            )
            for action in order
        ]

    def makespan(self, times: Sequence[StageTime], message: float) -> float:
        """Return the time from the first start to the last end.

        Args:
            times: Of every stage.
            message: Of a result to another rank, which holds up neither.
        """
        costs = [
            [t.forward for t in times],
            [t.backward for t in times],
            [t.backward - t.weight for t in times],
            [t.weight for t in times],
        ]
        free = [0.0] * self.num_ranks
        ends: list[float] = []
        for rank, kind, stage, needs in self._steps:
            start = free[rank]
            for source, travels in needs:
                # Ranks do not wait for what they send.
                ready = ends[source] + message if travels else ends[source]
                if ready > start:
                    start = ready
            end = start + costs[kind][stage]
            ends.append(end)
            free[rank] = end
        return max(free)


@lru_cache(maxsize=256)
def order_schedule(name: str, ranks: int, microbatches: int, virtual: int) -> OrderedSchedule:
    """Return the schedule in an order in which it can run.

    Args:
        name: A key of `SCHEDULES`, or a file.
        ranks: p.
        microbatches: m.
        virtual: Stages of a rank, where the schedule lets one choose them.
    """
    row = SCHEDULES.get(name)
    chosen = virtual if row is not None and row.chosen else None
    return OrderedSchedule(build_schedule(name, ranks, microbatches, chosen))


def pipeline_seconds(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int,
    times: Sequence[StageTime],
    message: float = 0.0,
) -> float:
    """Return the time of all micro-batches through the pipeline.

    Small pipelines are simulated whole. In others the steady state repeats every p micro-batches,
    and the difference of two simulations is added for every repetition: of 3 p and 4 p
    micro-batches, or, where p is large, of 2 p and 3 p.

    Args:
        name: A key of `SCHEDULES`, or a file.
        ranks: p, 2 or more.
        microbatches: m.
        virtual: Stages of a rank.
        times: Of every stage.
        message: Seconds of a message between two ranks.
    """
    if microbatches <= 5 * ranks or microbatches * ranks <= _SIMULATED:
        return order_schedule(name, ranks, microbatches, virtual).makespan(times, message)
    base = (3 if ranks <= 8 else 2) * ranks + microbatches % ranks
    # Two simulations that differ by one round of p micro-batches give the steady state's slope.
    first = order_schedule(name, ranks, base, virtual).makespan(times, message)
    second = order_schedule(name, ranks, base + ranks, virtual).makespan(times, message)
    return first + (second - first) * (microbatches - base) / ranks


def quick_pipeline(
    layout: Layout, times: Sequence[StageTime], busy: float, message: float
) -> float:
    """Return the time of all micro-batches in closed form, which orders the layouts of a search.

    Equal to the simulation for "gpipe", "1f1b" and "interleaved" with equal stages, p a divisor of
    m, and no messages.

    Args:
        layout: The layout.
        times: Of every stage.
        busy: Seconds that the busiest rank works.
        message: Seconds of a message between two ranks.

    **Source**: the bubbles of Narayanan et al. (2104.04473), section 2.2, and of Qi et al.
    (2401.10241), table 1.
    """
    p, v = layout.sizes.pipeline, layout.stages_per_rank
    mean = StageTime(
        sum(t.forward for t in times) / p,
        sum(t.backward for t in times) / p,
        sum(t.weight for t in times) / p,
    )
    idle = SCHEDULES[layout.schedule].idle(mean.forward, mean.backward, mean.weight, p)
    idle = max(0.0, idle) / v
    # The way of one micro-batch, which few of them do not fill.
    later = sum(t.weight for t in times) if layout.splits_backward else 0.0
    way = sum(t.forward + t.backward for t in times) - later
    return max(busy + (p - 1) * (idle + 2 * message), way)
