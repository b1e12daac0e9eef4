"""Where the time of a pipelined step went, what its schedule allows, and the split that would fix
it.

Definitions, for the span from the first start to the last end of any stage, the *makespan*:

- *busy*: a rank runs an action; of this, *exposed* is what it stood still for collectives inside
  its actions (tensor and data axes), *compute* is the rest;
- *idle*: the makespan less busy; of this, *waited* is what it stood still for messages;
- *bubble*: idle / makespan, of a rank; of the pipeline, the mean over its ranks, which is what
  `simulate.bubble_fraction` defines.

The *predicted* bubble is that of the schedule on paper with the median time that every stage took
for each kind of action, and messages that take no time. What is measured above it is spent on
messages, on waiting for a busy processor, and on actions that take longer than usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from lightning_par.engine.pipeline.actions import ActionKind, Schedule, TimedAction
from lightning_par.engine.pipeline.simulator import bubble_fraction, simulate, Simulation
from lightning_par.profiling.pipeline_record import StepRecord
from lightning_par.resolved_plan import balance_blocks, ResolvedPlan

__all__ = ["PipelineSummary", "RankTimes", "Split", "summarize_pipeline"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Where the makespan went on one rank of the pipeline; seconds, but for the fractions.

    Attributes:
        stages: Those that it holds.
        blocks: How many blocks each of them has.
        compute: Busy, less `exposed`.
        exposed: Stood still for collectives inside actions.
        waited: Stood still for messages of other stages; a part of the idle time.
        bubble: Idle share of the makespan.
        predicted: The same on paper.
    """

    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    compute: float
    exposed: float
    waited: float
    bubble: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many blocks the stages would have to hold, and what that would give on paper.

    Attributes:
        stage_blocks: For the strategy's option of the same name.
        bubble: Predicted.
        makespan: Predicted, in seconds.
    """

    stage_blocks: tuple[int, ...]
    bubble: float
    makespan: float


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """One step of one pipeline.

    Attributes:
        ranks: In the order of the pipeline.
        makespan: Measured, in seconds.
        bubble: Measured.
        predicted: On paper, with the stages' own times.
        predicted_makespan: The same, in seconds.
        balanced: On paper, if all stages took the mean time.
        imbalance: What the slowest stage takes more than the mean, as a fraction of the mean.
        split: The best split of the blocks; None if the blocks were not timed.
        simulation: What `predicted` was read from.
    """

    ranks: tuple[RankTimes, ...]
    makespan: float
    bubble: float
    predicted: float
    predicted_makespan: float
    balanced: float
    imbalance: float
    split: Split | None
    simulation: Simulation


def summarize_pipeline(
    steps: Sequence[StepRecord], resolved: ResolvedPlan, bounds: Sequence[tuple[int, int]]
) -> PipelineSummary:
    """Say where the time of a step went.

    Args:
        steps: The same step of every rank of a pipeline, in its order, on one clock.
        resolved: Of the model.
        bounds: First and one-past-last block of every stage.
    """
    rows = [step.actions for step in steps]
    schedule = _schedule_of(rows)
    costs = _Costs.of(rows, schedule.num_stages)
    simulation = costs.simulate(schedule)
    makespan = _span(rows)
    total = costs.total
    return PipelineSummary(
        ranks=tuple(
            _rank_times(step, row, makespan, simulation.makespan, bounds)
            for step, row in zip(steps, simulation.events, strict=True)
        ),
        makespan=makespan,
        bubble=bubble_fraction(rows),
        predicted=simulation.bubble,
        predicted_makespan=simulation.makespan,
        balanced=costs.levelled().simulate(schedule).bubble,
        imbalance=max(total) / mean(total) - 1,
        split=_best_split(steps, schedule, costs, resolved, bounds),
        simulation=simulation,
    )


def _schedule_of(rows: Sequence[Sequence[TimedAction]]) -> Schedule:
    """Return the schedule that the ranks walked through."""
    actions = tuple(tuple(event.action for event in row) for row in rows)
    owners = {a.stage: rank for rank, row in enumerate(actions) for a in row}
    return Schedule(
        name="measured",
        num_stages=len(owners),
        num_microbatches=1 + max(a.microbatch for row in actions for a in row),
        actions=actions,
        rank_of_stage=tuple(owners[stage] for stage in sorted(owners)),
    )


@dataclass(frozen=True)
class _Costs:
    """Median seconds of every stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[TimedAction]], num_stages: int) -> "_Costs":
        found: dict[tuple[int, ActionKind], list[float]] = {}
        for row in rows:
            for event in row:
                key = event.action.stage, event.action.kind
                found.setdefault(key, []).append(event.end - event.start)

        def cost(stage: int, kind: ActionKind) -> float:
            return median(found.get((stage, kind), [0.0]))

        weights = tuple(cost(s, _W) for s in range(num_stages))
        halves = [cost(s, _I) + weights[s] for s in range(num_stages)]
        whole = tuple(max(cost(s, _B), halves[s]) for s in range(num_stages))
        return cls(tuple(cost(s, _F) for s in range(num_stages)), whole, weights)

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    def simulate(self, schedule: Schedule) -> Simulation:
        return simulate(
            schedule,
            forward=self.forward,
            backward=self.backward,
            backward_weight=self.weight,
        )

    def levelled(self) -> "_Costs":
        """Return the costs if all stages took the mean time."""
        return self.scaled([mean(self.total)] * len(self.total))

    def scaled(self, total: Sequence[float]) -> "_Costs":
        """Return costs with these totals, and the shares that all stages together have."""
        whole = sum(self.total) or 1.0
        shares = (sum(part) / whole for part in (self.forward, self.backward, self.weight))
        return _Costs(*(tuple(share * t for t in total) for share in shares))


def _rank_times(
    step: StepRecord,
    simulated: Sequence[TimedAction],
    makespan: float,
    simulated_makespan: float,
    bounds: Sequence[tuple[int, int]],
) -> RankTimes:
    busy = sum(event.end - event.start for event in step.actions)
    exposed = _exposed_inside(step)
    stages = tuple(sorted({event.action.stage for event in step.actions}))
    on_paper = sum(event.end - event.start for event in simulated)
    return RankTimes(
        stages=stages,
        blocks=tuple(bounds[s][1] - bounds[s][0] for s in stages),
        compute=busy - exposed,
        exposed=exposed,
        waited=sum(step.waits),
        bubble=1 - busy / makespan,
        predicted=1 - on_paper / simulated_makespan if simulated_makespan else 0.0,
    )


def _exposed_inside(step: StepRecord) -> float:
    """Return how long the rank stood still for communication while it ran actions."""
    waits = sorted(interval for t in step.transfers for interval in t.exposed)
    actions = sorted((event.start, event.end) for event in step.actions)
    total, index, reached = 0.0, 0, float("-inf")
    for start, end in waits:
        start = max(start, reached)  # waits of several threads may overlap; count them once
        while index < len(actions) and actions[index][1] <= start:
            index += 1
        for lo, hi in actions[index:]:
            if lo >= end:
                break
            total += max(0.0, min(end, hi) - max(start, lo))
        reached = max(reached, end)
    return total


def _best_split(
    steps: Sequence[StepRecord],
    schedule: Schedule,
    costs: _Costs,
    resolved: ResolvedPlan,
    bounds: Sequence[tuple[int, int]],
) -> Split | None:
    """Give every block the share of its stage's time that its forward has of the stage's; what is
    left on the first and the last stage runs before and after the blocks.
    """
    timed: dict[int, float] = {}
    for step in steps:
        timed |= step.blocks
    if len(timed) != bounds[-1][1] or len(timed) < 2:
        return None
    weights = [0.0] * len(timed)
    edges = [0.0, 0.0]
    last = len(bounds) - 1
    for stage, (lo, hi) in enumerate(bounds):
        of_blocks = sum(timed[b] for b in range(lo, hi))
        inside = of_blocks if stage not in (0, last) else max(costs.forward[stage], of_blocks)
        for block in range(lo, hi):
            weights[block] = costs.total[stage] * timed[block] / (inside or 1.0)
        left = costs.total[stage] - sum(weights[lo:hi])
        if stage in (0, last):
            edges[0 if stage == 0 else 1] = left
    nanoseconds = replace(
        resolved,
        block_weights=tuple(round(w * 1e9) for w in weights),
        edge_weights=(round(edges[0] * 1e9), round(edges[1] * 1e9)),
    )
    best = balance_blocks(nanoseconds, len(bounds))
    total = [sum(weights[lo:hi]) for lo, hi in best]
    total[0] += edges[0]
    total[-1] += edges[1]
    simulation = costs.scaled(total).simulate(schedule)
    if max(total) >= max(costs.total):
        best, simulation = tuple(bounds), costs.simulate(schedule)
    return Split(
        stage_blocks=tuple(hi - lo for lo, hi in best),
        bubble=simulation.bubble,
        makespan=simulation.makespan,
    )


def _span(rows: Sequence[Sequence[TimedAction]]) -> float:
    everything = [event for row in rows for event in row]
    return max(e.end for e in everything) - min(e.start for e in everything)
