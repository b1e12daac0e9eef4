"""Time breakdown of a pipelined step: compute, exposed communication, bubble, and a better split.

Definitions, for the span from the first start to the last end of an action of any stage, the
*makespan*:

- *busy*: a rank runs an action; of this, *exposed* is the time it was blocked by collectives inside
  actions (tensor and data axes), *compute* is the rest;
- *idle*: the makespan less busy; of this, *waited* is the time it was blocked by receives;
- *bubble*: idle / makespan of a rank; of the pipeline, the mean over its ranks, as
  `simulator.bubble_fraction` defines it.

The *predicted* bubble is that of the simulated schedule, with the median time that every stage took
for each kind of action, and free communication. The measured bubble exceeds it by the time of
messages, by contention for the processor, and by actions slower than the median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from lightning_par.engine.pipeline.actions import ActionKind, Schedule, TimedAction
from lightning_par.engine.pipeline.simulator import bubble_fraction, simulate, Simulation
from lightning_par.plan.resolved_plan import balance_blocks, ResolvedPlan
from lightning_par.profiling.pipeline_record import StepRecord, TimedTransfer

__all__ = ["PipelineSummary", "RankTimes", "Split", "summarize_pipeline"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
_WORTH = 0.05
"""Fraction of the makespan that another split has to promise: times of blocks vary by chance."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Breakdown of the makespan on one rank of the pipeline.

    Attributes:
        stages: Stages of this rank.
        blocks: Number of blocks in each of these stages.
        compute: Seconds in actions, less `exposed`.
        exposed: Seconds blocked by collectives inside actions.
        exposed_on: Mesh axis -> the part of `exposed` that its collectives took.
        waited: Seconds blocked by receives from other stages; a part of the idle time.
        bubble: Idle fraction of the makespan.
        predicted: Idle fraction in the simulated schedule.
    """

    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    compute: float
    exposed: float
    exposed_on: Mapping[str, float]
    waited: float
    bubble: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split of the blocks into stages, and what the simulator predicts for it.

    Attributes:
        stage_blocks: Number of blocks per stage: the strategy's option of the same name.
        bubble: Predicted bubble, as a fraction.
        makespan: Predicted makespan, in seconds.
    """

    stage_blocks: tuple[int, ...]
    bubble: float
    makespan: float


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """Time breakdown of one step of one pipeline.

    Attributes:
        ranks: Breakdown per rank, in the order of the pipeline.
        makespan: Measured makespan, in seconds.
        bubble: Measured bubble, as a fraction.
        predicted: Simulated bubble, with the median times of every stage.
        predicted_makespan: Simulated makespan, in seconds.
        balanced: Simulated bubble if all stages took the mean time.
        imbalance: Excess of the slowest stage over the mean, as a fraction of the mean.
        split: The best split of the blocks, or the present one, or that of a run without
            `stage_blocks`, unless another promises 5 % less time; None if the blocks were not
            timed.
        simulation: The simulation behind `predicted`.
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
    """Break down the time of a pipelined step.

    Args:
        steps: The same step of every rank of one pipeline, in the order of its ranks, on one clock.
        resolved: Resolved plan of the model.
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
        balanced=costs.balanced().simulate(schedule).bubble,
        imbalance=max(total) / mean(total) - 1,
        split=_best_split(steps, schedule, costs, resolved, bounds),
        simulation=simulation,
    )


def _schedule_of(rows: Sequence[Sequence[TimedAction]]) -> Schedule:
    """Return the schedule that the ranks executed."""
    actions = tuple(tuple(event.action for event in row) for row in rows)
    # As they ran: nobody has to say which schedule it was.
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
    """Median seconds per stage: of a forward, a whole backward, and its weight half."""

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
            # A median: the first micro-batch of a step compiles, allocates or waits.
            return median(found.get((stage, kind), [0.0]))

        # A stage has whole backwards (B) or the two halves (I, W); of a schedule that mixes them,
        # the slower counts.
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

    def balanced(self) -> "_Costs":
        """Return the costs if all stages took the mean time."""
        return self.scaled([mean(self.total)] * len(self.total))

    def scaled(self, total: Sequence[float]) -> "_Costs":
        """Return costs with other totals per stage.

        Args:
            total: Seconds of forward and backward, per stage; divided among the kinds of actions
                in the proportion that they have over all stages.
        """
        whole = sum(self.total) or 1.0
        # Of all stages together: a single stage's own proportion would move with its noise.
        fractions = (sum(kind) / whole for kind in (self.forward, self.backward, self.weight))
        return _Costs(*(tuple(fraction * t for t in total) for fraction in fractions))


def _rank_times(
    step: StepRecord,
    simulated: Sequence[TimedAction],
    makespan: float,
    simulated_makespan: float,
    bounds: Sequence[tuple[int, int]],
) -> RankTimes:
    busy = sum(event.end - event.start for event in step.actions)
    exposed = _exposed_inside(step, step.transfers)
    axes = {transfer.axis for transfer in step.transfers}
    by_axis = {a: _exposed_inside(step, [t for t in step.transfers if t.axis == a]) for a in axes}
    stages = tuple(sorted({event.action.stage for event in step.actions}))
    simulated_busy = sum(event.end - event.start for event in simulated)
    return RankTimes(
        stages=stages,
        blocks=tuple(bounds[s][1] - bounds[s][0] for s in stages),
        compute=busy - exposed,
        exposed=exposed,
        exposed_on=by_axis,
        waited=sum(step.waits),
        # The makespan of all ranks: what a rank idles at the ends counts.
        bubble=1 - busy / makespan,
        predicted=1 - simulated_busy / simulated_makespan if simulated_makespan else 0.0,
    )


def _exposed_inside(step: StepRecord, transfers: Sequence[TimedTransfer]) -> float:
    """Return the seconds for which these transfers blocked the rank inside its actions."""
    # Both lists are sorted by time, so one pass over them intersects all intervals.
    waits = sorted(interval for t in transfers for interval in t.exposed)
    actions = sorted((event.start, event.end) for event in step.actions)
    total, index, reached = 0.0, 0, float("-inf")
    for start, end in waits:
        start = max(start, reached)  # waits of several threads may overlap; count them once
        # No later wait overlaps with these.
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
    """Return the split of the blocks with the smallest slowest stage, if it is worth a change; None
    if blocks lack times.

    Only forwards of blocks are timed. A block is given the fraction of its stage's total time that
    its forward has of the stage's forward. The rest of the first and last stage is embedding and
    head, which no split moves.
    """
    timed: dict[int, float] = {}
    for step in steps:
        timed |= step.blocks
    # Some block was not timed on any rank: then nobody knows what to move.
    if len(timed) != bounds[-1][1] or len(timed) < 2:
        return None
    weights = [0.0] * len(timed)
    edges = [0.0, 0.0]
    last = len(bounds) - 1
    for stage, (lo, hi) in enumerate(bounds):
        of_blocks = sum(timed[b] for b in range(lo, hi))
        # An inner stage holds nothing but blocks: what the hooks missed of its forward is theirs.
        inside = of_blocks if stage not in (0, last) else max(costs.forward[stage], of_blocks)
        for block in range(lo, hi):
            # Forward and backward of a block in the proportion of its forward.
            weights[block] = costs.total[stage] * timed[block] / (inside or 1.0)
        if stage in (0, last):
            edges[0 if stage == 0 else 1] = costs.total[stage] - sum(weights[lo:hi])
    # The balancer takes whole numbers, elsewhere numbers of parameters.
    nanoseconds = replace(
        resolved,
        block_weights=tuple(round(w * 1e9) for w in weights),
        edge_weights=(round(edges[0] * 1e9), round(edges[1] * 1e9)),
    )

    def simulate(split: Sequence[tuple[int, int]]) -> Simulation:
        total = [sum(weights[lo:hi]) for lo, hi in split]
        # Embedding and head stay where they are.
        total[0] += edges[0]
        total[-1] += edges[1]
        return costs.scaled(total).simulate(schedule)

    best, simulation = tuple(bounds), costs.simulate(schedule)
    # First the split of a run without stage_blocks: single blocks are measured less surely.
    for other in (balance_blocks(resolved, len(bounds)), balance_blocks(nanoseconds, len(bounds))):
        promised = simulate(other)
        if promised.makespan < (1 - _WORTH) * simulation.makespan:
            best, simulation = other, promised
    return Split(
        stage_blocks=tuple(hi - lo for lo, hi in best),
        bubble=simulation.bubble,
        makespan=simulation.makespan,
    )


def _span(rows: Sequence[Sequence[TimedAction]]) -> float:
    events = [event for row in rows for event in row]
    return max(e.end for e in events) - min(e.start for e in events)
