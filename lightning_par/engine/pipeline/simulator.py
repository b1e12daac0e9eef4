"""Simulator of schedules: validity, deadlocks, times, bubble, activations in flight, and a grid.

Note [Buffered messages]: an action starts when its rank is free and its inputs are there. Results
travel without holding up the rank that sends them, as asynchronous sends do, and wait at the
receiver. A deadlock is therefore a circle of inputs, never a full channel.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_par.engine.pipeline.actions import Action, ActionKind, Schedule, TimedAction
from lightning_par.engine.pipeline.validation import (
    crossed_messages,
    early_actions,
    foreign_actions,
    inputs_of,
    missing_actions,
)
from lightning_par.errors import raise_problems, ScheduleError

__all__ = [
    "Simulation",
    "bubble_fraction",
    "format_schedule",
    "simulate",
    "span_bubble_fraction",
    "validate_schedule",
]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Times, bubble and memory of a simulated schedule.

    Args:
        events: The actions of each rank with their times, in the order in which it ran them.
        makespan: Time from the first start to the last end, in the unit of the costs.
        bubble: The idle fraction, 1 - busy / (ranks * makespan); see `bubble_fraction`.
        span_bubble: The idle fraction of the longest span of a rank; see `span_bubble_fraction`.
        peak_in_flight: For each stage, the most micro-batches whose activations it held at once. A
            stage that has no backward holds one: the one it works on.
        peak_per_rank: For each rank, the same for all its stages together, as a fraction of their
            number: a micro-batch in one of two stages counts as a half.
    """

    events: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    bubble: float
    span_bubble: float
    peak_in_flight: tuple[int, ...]
    peak_per_rank: tuple[float, ...]


def bubble_fraction(events: Sequence[Sequence[TimedAction]]) -> float:
    """Return the idle fraction of a step: 1 - busy / (ranks * makespan).

    The makespan runs from the first start to the last end over ALL ranks. Idle time inside each
    rank's own span, the other definition in use, is lower by 0.03 to 0.1.

    Args:
        events: The timed actions of each rank, on one clock; a rank runs one at a time.

    Returns:
        A fraction from 0 to 1; 0.0 if nothing ran.
    """
    everything = [event for row in events for event in row]
    makespan = _makespan(everything)
    if makespan == 0:
        return 0.0
    # Of all ranks: a rank that ends early idles until the last one is done.
    busy = sum(event.end - event.start for event in everything)
    return 1 - busy / (len(events) * makespan)


def span_bubble_fraction(events: Sequence[Sequence[TimedAction]]) -> float:
    """Return the idle fraction of the longest span of a rank: 1 - busy / span.

    A span runs from a rank's own first start to its own last end, so that the ranks' starting one
    after the other is no bubble. This is what papers on zero-bubble schedules report; the ranks
    then must not wait for each other between two steps.

    Args:
        events: The timed actions of each rank, on one clock; a rank runs one at a time.

    Returns:
        A fraction from 0 to 1; 0.0 if nothing ran. Busy is the mean over the ranks.

    Source:
        Qi et al. 2401.10241, section 5.3: (cost - m (T_F + T_B + T_W)) / cost.
    """
    spans = [_makespan(row) for row in events]
    if max(spans, default=0.0) == 0:
        return 0.0
    busy = sum(event.end - event.start for row in events for event in row)
    return 1 - busy / (len(events) * max(spans))


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    backward_weight: float | Sequence[float] | None = None,
    p2p: float = 0.0,
) -> Simulation:
    """Simulate `schedule`; see Note [Buffered messages].

    >>> from lightning_par.engine.pipeline.schedules import one_f_one_b
    >>> simulation = simulate(one_f_one_b(4, 8))
    >>> simulation.makespan, round(simulation.bubble, 4), simulation.peak_in_flight
    (33.0, 0.2727, (4, 3, 2, 1))

    Args:
        schedule: The schedule to simulate.
        forward: Cost of one forward, in any unit of time: one number, or one per stage.
        backward: Cost of one whole backward, both halves.
        backward_weight: Cost of a `BACKWARD_WEIGHT`; `BACKWARD_INPUT` takes the rest. None: half.
        p2p: Time a result takes to another rank; nothing within a rank.

    Returns:
        Times, bubble and activations in flight.

    Raises:
        ScheduleError: The schedule deadlocks (each rank's blocked action is named) or has an action
            of another pipeline or rank, a cost is negative, or there is not one cost per stage.
    """
    forwards = _per_stage("forward", forward, schedule.num_stages)
    backwards = _per_stage("backward", backward, schedule.num_stages)
    weights = [cost / 2 for cost in backwards]
    if backward_weight is not None:
        weights = _per_stage("backward_weight", backward_weight, schedule.num_stages)
    # The two halves of a backward add up to it.
    inputs = [whole - weight for whole, weight in zip(backwards, weights, strict=True)]
    _per_stage("backward - backward_weight", inputs, schedule.num_stages)
    if p2p < 0:
        raise ScheduleError("LP404", f"p2p={p2p}: a time cannot be negative. Use 0 or more.")
    raise_problems(ScheduleError, "LP403", list(foreign_actions(schedule, training=True)))
    costs = {_F: forwards, _B: backwards, _I: inputs, _W: weights}
    walk = _Walk(schedule, costs, p2p)
    raise_problems(ScheduleError, "LP403", walk.run())
    events = tuple(tuple(row) for row in walk.events)
    return Simulation(
        events=events,
        makespan=_makespan([event for row in events for event in row]),
        bubble=bubble_fraction(events),
        span_bubble=span_bubble_fraction(events),
        peak_in_flight=_peak_in_flight(schedule),
        peak_per_rank=_peak_per_rank(schedule),
    )


def validate_schedule(schedule: Schedule, *, training: bool = True) -> None:
    """Check that every rank can run its actions to the end and that nothing is left undone.

    Each micro-batch must pass each stage once: a forward and, if `training`, either a whole
    backward or its two halves, on the rank that holds the stage, each after what it needs there.
    Messages carry no number, so that a rank must take them in the order in which they are sent.
    Only a schedule that has all this is searched for deadlocks; see Note [Buffered messages].

    Args:
        schedule: The schedule to check.
        training: Whether backwards must be there; else they must not be.

    Raises:
        ScheduleError: Every missing, repeated, misplaced, unknown or too early action; or every
            pair of ranks whose messages cross; or, in a deadlock, the blocked action of each rank
            and what it waits for.
    """
    problems = [
        *foreign_actions(schedule, training),
        *missing_actions(schedule, training),
        *early_actions(schedule),
    ] or list(crossed_messages(schedule))
    if not problems:
        costs = dict.fromkeys(ActionKind, [1.0] * schedule.num_stages)
        # Times do not matter here: a schedule deadlocks with any or with none.
        problems = _Walk(schedule, costs, 0.0).run()
    raise_problems(ScheduleError, "LP403", problems)


def format_schedule(schedule: Schedule, *, forward: int = 1, backward: int = 2) -> str:
    """Return the time grid as text: one row per rank, one column per unit of time.

    An action that takes several units is continued by dashes, a dot is an idle unit.

    >>> from lightning_par.engine.pipeline.schedules import gpipe
    >>> print(format_schedule(gpipe(2, 2)))
    gpipe: 2 stages, 2 micro-batches, bubble 33.3 %
    rank 0 | 0F0 0F1  .   .   .  0B0 --- 0B1 ---
    rank 1 |  .  1F0 1F1 1B0 --- 1B1 ---  .   .

    Args:
        schedule: The schedule to print.
        forward: Units that one forward takes, at least 1.
        backward: Units that one whole backward takes, at least 1; even if it comes in halves.

    Returns:
        Lines without a final line break.

    Raises:
        ScheduleError: The schedule deadlocks, or a cost is less than 1.
    """
    if min(forward, backward) < 1:
        raise ScheduleError(
            "LP404",
            f"forward={forward} and backward={backward} must both be 1 or more units of time.",
        )
    simulation = simulate(schedule, forward=forward, backward=backward)
    width = max((len(str(event.action)) for row in simulation.events for event in row), default=1)
    lines = [
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"micro-batches, bubble {simulation.bubble:.1%}".replace("%", " %")
    ]
    label = len(f"rank {schedule.num_ranks - 1}")
    for rank, row in enumerate(simulation.events):
        cells = [".".center(width)] * round(simulation.makespan)
        for event in row:
            start, end = round(event.start), round(event.end)
            cells[start:end] = ["-" * width] * (end - start)
            cells[start] = str(event.action).center(width)
        lines.append(f"{f'rank {rank}':<{label}} | {' '.join(cells)}".rstrip())
    return "\n".join(lines)


class _Walk:
    """The state of one simulation: when each action was done, and how far each rank has come."""

    def __init__(
        self, schedule: Schedule, costs: Mapping[ActionKind, Sequence[float]], p2p: float
    ) -> None:
        self._costs = costs
        self._schedule = schedule
        self._p2p = p2p
        self._done: dict[Action, float] = {}
        self.events: list[list[TimedAction]] = [[] for _ in schedule.actions]

    def run(self) -> list[str]:
        """Run all actions that can run; return the problem if some cannot."""
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(self._schedule.actions):
                # As far as this rank can go; others may then continue.
                # An action may become possible by one of another rank, so that all ranks are
                # tried again.
                while len(self.events[rank]) < len(actions) and self._step(rank):
                    progress = True
        blocked = [
            f"rank {rank} cannot run {actions[len(done)]} before "
            f"{self._missing_input(actions[len(done)])} has run"
            for rank, (actions, done) in enumerate(
                zip(self._schedule.actions, self.events, strict=True)
            )
            if len(done) < len(actions)
        ]
        if not blocked:
            return []
        circle = "; ".join(blocked)
        cure = "Move an action that another action waits for to an earlier place in its rank's row."
        return [
            f"the pipeline schedule {self._schedule.name!r} ends in a deadlock: {circle}. {cure}"
        ]

    def _step(self, rank: int) -> bool:
        """Run the next action of `rank`, if it has its inputs; return whether it had."""
        action = self._schedule.actions[rank][len(self.events[rank])]
        start = self.events[rank][-1].end if self.events[rank] else 0.0
        for choices in inputs_of(action, self._schedule.num_stages):
            source = next((choice for choice in choices if choice in self._done), None)
            if source is None:
                return False
            # Within a rank a result is there at once.
            owners = self._schedule.rank_of_stage
            travels = owners[source.stage] != owners[action.stage]
            start = max(start, self._done[source] + (self._p2p if travels else 0.0))
        end = start + self._costs[action.kind][action.stage]
        self._done[action] = end
        self.events[rank].append(TimedAction(action, start, end))
        return True

    def _missing_input(self, action: Action) -> str:
        planned = {other for row in self._schedule.actions for other in row}
        for choices in inputs_of(action, self._schedule.num_stages):
            if not any(choice in self._done for choice in choices):
                known = [choice for choice in choices if choice in planned]
                return str(known[0]) if known else f"{choices[0]} (which no rank runs)"
        raise AssertionError(f"{action} has all its inputs")


def _peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    peaks = [0] * schedule.num_stages
    for actions in schedule.actions:
        ended = {(a.stage, a.microbatch) for a in actions if a.kind.ends_microbatch}
        held: Counter[int] = Counter()
        for action in actions:
            if action.kind is _F:
                # Without a backward, as in evaluation, a stage holds a micro-batch only while it
                # works on it.
                kept = (action.stage, action.microbatch) in ended
                peaks[action.stage] = max(peaks[action.stage], held[action.stage] + 1)
                held[action.stage] += kept
            elif action.kind.ends_microbatch:
                held[action.stage] -= 1
    return tuple(peaks)


def _peak_per_rank(schedule: Schedule) -> tuple[float, ...]:
    peaks = []
    for rank, actions in enumerate(schedule.actions):
        ended = {(a.stage, a.microbatch) for a in actions if a.kind.ends_microbatch}
        held = peak = 0
        for action in actions:
            if action.kind is _F:
                peak = max(peak, held + 1)
                held += (action.stage, action.microbatch) in ended
            elif action.kind.ends_microbatch:
                held -= 1
        peaks.append(peak / max(1, len(schedule.stages_of_rank(rank))))
    return tuple(peaks)


def _per_stage(name: str, cost: float | Sequence[float], num_stages: int) -> list[float]:
    costs = [float(c) for c in cost] if isinstance(cost, Sequence) else [float(cost)] * num_stages
    if len(costs) != num_stages:
        raise ScheduleError(
            "LP404",
            f"{name} has {len(costs)} costs, but there are {num_stages} stages. Give one number "
            "for all stages, or one number for each.",
        )
    negative = [c for c in costs if c < 0]
    if negative:
        raise ScheduleError(
            "LP404", f"{name}={negative[0]}: a time cannot be negative. Use 0 or more."
        )
    return costs


def _makespan(events: Sequence[TimedAction]) -> float:
    if not events:
        return 0.0
    return max(event.end for event in events) - min(event.start for event in events)
