"""Pipeline schedules as data: who runs which micro-batch of which stage, in which order.

A schedule is a value made by a pure function. It says nothing of tensors or processes, so that one
process can validate, simulate, print and draw it (`simulate.py`, `draw.py`), and the executor does
no more than walk through it.

    >>> print(*one_f_one_b(2, 3).actions[0])
    0F0 0F1 0B0 0F2 0B1 0B2

p is the number of stages, m the number of micro-batches.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from lightning_par.errors import raise_problems, ScheduleError

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Schedule",
    "TimedAction",
    "build_schedule",
    "forward_only",
    "gpipe",
    "one_f_one_b",
    "parse_actions",
]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class ActionKind(Enum):
    """What an action computes; the value is the letter it prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Only the gradient of the stage's input, which is what the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Only the gradients of the stage's weights; comes after `BACKWARD_INPUT`."""

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the previous stage may go on once this action is done."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @property
    def ends_microbatch(self) -> bool:
        """Whether the stage may free the micro-batch's activations once this action is done."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a pipeline; prints as ``2F0`` (stage 2, forward, micro-batch 0).

    Args:
        stage: Index of the stage, from 0 (holds the input) to p - 1 (holds the loss).
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
        """Gives the action that prints as `text`.

        Raises:
            ScheduleError: `text` is not a stage, one of F, B, I, W, and a micro-batch.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write the stage, one of F, B, I, W, and the "
                "micro-batch, like 2F0."
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
        name: What it is called, as in `SCHEDULES`.
        num_stages: p, the number of pieces of the model.
        num_microbatches: m, the number of pieces of the batch.
        actions: The actions of each rank, in the order in which it runs them.
        rank_of_stage: The rank that holds each stage; a rank may hold several.

    Raises:
        ScheduleError: p or m is less than 1, or `rank_of_stage` does not place p stages on the
            ranks. Whether the actions can run is the matter of `simulate.validate_schedule`.
    """

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        problems = _count_problems(self.name, self.num_stages, self.num_microbatches)
        if len(self.rank_of_stage) != self.num_stages:
            problems.append(
                f"{self.name}: rank_of_stage places {len(self.rank_of_stage)} stages, num_stages "
                f"is {self.num_stages}. Give one rank per stage."
            )
        problems += [
            f"{self.name}: stage {stage} is placed on rank {rank}, but there are {self.num_ranks} "
            f"ranks. Use 0 to {self.num_ranks - 1}."
            for stage, rank in enumerate(self.rank_of_stage)
            if not 0 <= rank < self.num_ranks
        ]
        raise_problems(ScheduleError, problems)

    @property
    def num_ranks(self) -> int:
        """The number of processes that the schedule runs on."""
        return len(self.actions)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Gives the stages that `rank` holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Gives the actions written in `text`, separated by white space.

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
            problems.append(str(error))
    raise_problems(ScheduleError, problems)
    return tuple(actions)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Makes the schedule of validation and prediction: every micro-batch forward, in order.

    Args:
        num_stages: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.
    """
    return _one_stage_per_rank("forward_only", num_stages, num_microbatches, _forwards)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Makes the GPipe schedule: all forwards, then all backwards in the same order.

    Its bubble is (p - 1) / (m + p - 1), and every stage holds the activations of m micro-batches at
    its peak.

    Args:
        num_stages: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.

    Source:
        Huang et al. 2019, "GPipe", section 2.3. Ours takes the backwards in the order of the
        forwards, as torch's `ScheduleGPipe` does, not in reverse; the bubble is the same.
    """
    return _one_stage_per_rank("gpipe", num_stages, num_microbatches, _forwards_then_backwards)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Makes the 1F1B schedule: after a warm-up, one forward and one backward in turn.

    Its bubble is that of GPipe, (p - 1) / (m + p - 1), but stage s holds min(p - s, m)
    micro-batches at its peak.

    Args:
        num_stages: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.

    Source:
        Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", section 2.2.1 (PipeDream-Flush).
    """
    return _one_stage_per_rank("1f1b", num_stages, num_microbatches, _warm_up_then_alternate)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe}
)
"""The training schedules by name; each takes the number of stages and of micro-batches."""


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Makes the training schedule called `name`.

    Args:
        name: A key of `SCHEDULES`.
        num_stages: p, at least 1.
        num_microbatches: m, at least 1.

    Returns:
        The schedule.

    Raises:
        ScheduleError: No schedule has that name, or p or m is less than 1.
    """
    if name not in SCHEDULES:
        valid = ", ".join(sorted(SCHEDULES))
        raise ScheduleError(f"schedule={name!r} does not exist. Use one of {valid}.")
    return SCHEDULES[name](num_stages, num_microbatches)


def _one_stage_per_rank(
    name: str,
    num_stages: int,
    num_microbatches: int,
    order: Callable[[int, int, int], list[Action]],
) -> Schedule:
    raise_problems(ScheduleError, _count_problems(name, num_stages, num_microbatches))
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        actions=tuple(
            tuple(order(stage, num_stages, num_microbatches)) for stage in range(num_stages)
        ),
        rank_of_stage=tuple(range(num_stages)),
    )


def _count_problems(name: str, num_stages: int, num_microbatches: int) -> list[str]:
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    return [f"{name}: {key}={value}. Use 1 or more." for key, value in counts.items() if value < 1]


def _each_microbatch(stage: int, kind: ActionKind, num_microbatches: int) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in range(num_microbatches)]


def _forwards(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    return _each_microbatch(stage, ActionKind.FORWARD, num_microbatches)


def _forwards_then_backwards(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    forwards = _each_microbatch(stage, ActionKind.FORWARD, num_microbatches)
    return forwards + _each_microbatch(stage, ActionKind.BACKWARD, num_microbatches)


def _warm_up_then_alternate(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    forwards = _each_microbatch(stage, ActionKind.FORWARD, num_microbatches)
    backwards = _each_microbatch(stage, ActionKind.BACKWARD, num_microbatches)
    warm_up = min(num_stages - 1 - stage, num_microbatches)
    steady = num_microbatches - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]
