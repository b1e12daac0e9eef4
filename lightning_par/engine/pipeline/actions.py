"""Pipeline schedules as data: who runs which micro-batch of which stage, in which order.

A schedule is a value, made by a pure function (`schedules.py`, `zero_bubble.py`) or read from a
file. It says nothing of tensors or processes, so that one process can validate, simulate, print and
draw it (`simulator.py`), and the executor does no more than walk through it.

p is the number of ranks, m the number of micro-batches. Most schedules place one stage on a rank;
where a rank holds v stages, the model is cut into p * v.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum

from lightning_par.errors import raise_problems, ScheduleError

__all__ = ["Action", "ActionKind", "Schedule", "TimedAction", "count_problems", "parse_actions"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class ActionKind(Enum):
    """What an action computes; the value is the letter it prints as.

    Attributes:
        gives_input_gradient: Whether the previous stage may go on once this action is done.
        ends_microbatch: Whether the stage may free the micro-batch's activations after it.
    """

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Only the gradient of the stage's input, which is what the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Only the gradients of the stage's weights; comes after `BACKWARD_INPUT`."""

    def __init__(self, letter: str) -> None:
        # Plain attributes: the executor reads them for every action.
        self.gives_input_gradient = letter in "BI"
        self.ends_microbatch = letter in "BW"


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a pipeline; prints as ``2F0`` (stage 2, forward, micro-batch 0).

    Args:
        stage: Index of the stage, from 0 (holds the input) to the number of stages - 1 (holds the
            loss).
        kind: What is computed.
        microbatch: Index of the micro-batch, from 0 to m - 1.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: `text` is not a stage, one of F, B, I, W, and a micro-batch.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                "LP401",
                f"{text!r} is not an action of a pipeline schedule. An action is the number of a "
                "stage, a letter, and the number of a micro-batch, such as 2F0. The letters are F "
                "(forward), B (backward), I (gradient of the input) and W (gradient of the "
                "weights).",
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with the time at which it ran, simulated or measured.

    Args:
        action: What ran.
        start: When it began: seconds on a clock common to the ranks, or units of the simulator.
        end: When it was done, on the same clock; never before `start`.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which each rank of a pipeline runs its actions.

    Args:
        name: What it is called.
        num_stages: Number of stages of the model.
        num_microbatches: m, the number of micro-batches of a step.
        actions: The actions of each rank, in the order in which it runs them.
        rank_of_stage: The rank that holds each stage; a rank may hold several.

    Raises:
        ScheduleError: A count is less than 1, or `rank_of_stage` does not place the stages on the
            ranks. Whether the actions can run is the matter of `validate_schedule`.
    """

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        problems = count_problems(
            self.name, num_stages=self.num_stages, num_microbatches=self.num_microbatches
        )
        if len(self.rank_of_stage) != self.num_stages:
            problems.append(
                f"schedule {self.name}: rank_of_stage lists the ranks of "
                f"{len(self.rank_of_stage)} stages, but num_stages is {self.num_stages}. List one "
                "rank for each stage."
            )
        problems += [
            f"schedule {self.name}: stage {stage} is placed on rank {rank}, but there are "
            f"{self.num_ranks} ranks. Use a rank from 0 to {self.num_ranks - 1}."
            for stage, rank in enumerate(self.rank_of_stage)
            if not 0 <= rank < self.num_ranks
        ]
        raise_problems(ScheduleError, "LP402", problems)

    @property
    def num_ranks(self) -> int:
        """The number of processes that the schedule runs on."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward comes in two halves, so that weights' gradients can wait."""
        return any(a.kind is ActionKind.BACKWARD_WEIGHT for row in self.actions for a in row)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)

    def first(self, num_microbatches: int) -> "Schedule":
        """Return the same schedule with only the first micro-batches.

        An order that can run can run without some of its micro-batches too, since what is left
        waits for nothing that is gone.

        Args:
            num_microbatches: How many to keep, from 1 to m.
        """
        # In the order of the file, so that what a rank waits for still comes before.
        kept = tuple(
            tuple(a for a in row if a.microbatch < num_microbatches) for row in self.actions
        )
        return replace(self, num_microbatches=num_microbatches, actions=kept)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return the actions written in `text`, separated by white space.

    >>> [action.kind.name for action in parse_actions("0F0 0B0")]
    ['FORWARD', 'BACKWARD']

    Raises:
        ScheduleError: A word is not an action; every such word is named.
    """
    actions, problems = [], []
    for word in text.split():
        try:
            actions.append(Action.parse(word))
        except ScheduleError as error:
            problems.append(error.message)
    raise_problems(ScheduleError, "LP401", problems)
    return tuple(actions)


def count_problems(name: str, **counts: int) -> list[str]:
    """Return a problem for every count of a schedule that is less than 1.

    Args:
        name: Of the schedule.
        counts: By the name of the argument.
    """
    return [
        f"schedule {name}: {key}={value} must be 1 or more."
        for key, value in counts.items()
        if value < 1
    ]
