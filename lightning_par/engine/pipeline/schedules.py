"""Schedules by name (GPipe, 1F1B, interleaved, zero-bubble), and from a file.

>>> print(*one_f_one_b(2, 3).actions[0])
0F0 0F1 0B0 0F2 0B1 0B2

p is the number of ranks, m the number of micro-batches, v the number of stages per rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_par.engine.pipeline.actions import (
    Action,
    ActionKind,
    count_problems,
    parse_actions,
    Schedule,
)
from lightning_par.engine.pipeline.orders import (
    alternate,
    check_stages_per_rank,
    order_rounds,
)
from lightning_par.engine.pipeline.simulator import validate_schedule
from lightning_par.engine.pipeline.zero_bubble import (
    dualpipev,
    further_in_flight,
    interleaved_zb,
    zb_h1,
    zb_h2,
    zbv,
)
from lightning_par.errors import either, raise_problems, ScheduleError

__all__ = [
    "SCHEDULES",
    "ScheduleSpec",
    "build_schedule",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "place_stages",
    "read_schedule",
    "splits_backward",
]

_F = ActionKind.FORWARD


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards in the same order.

    Its bubble is (p - 1) / (m + p - 1), and every stage holds the activations of m micro-batches at
    its peak.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.

    Source:
        Huang et al. 2019, "GPipe", section 2.3. Ours takes the backwards in the order of the
        forwards, as torch's `ScheduleGPipe` does, not in reverse; the bubble is the same.
    """
    # A warm-up of all forwards.
    return order_rounds(
        "gpipe", num_ranks, num_microbatches, lambda _, f, b: alternate(f, b, num_microbatches)
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule: after a warm-up, one forward and one backward in turn.

    Its bubble is that of GPipe, (p - 1) / (m + p - 1), but stage s holds min(p - s, m)
    micro-batches at its peak.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1; may be less than p.

    Returns:
        A schedule with stage s on rank s.

    Raises:
        ScheduleError: p or m is less than 1.

    Source:
        Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", section 2.2.1 (PipeDream-Flush).
    """
    return order_rounds(
        "1f1b", num_ranks, num_microbatches, lambda s, f, b: alternate(f, b, num_ranks - 1 - s)
    )


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule: rank r holds the stages r, r + p, ..., r + (v - 1) p.

    If p divides m, its bubble is (p - 1) / (v m + p - 1), at v times the messages of 1F1B, and
    rank 0 holds the activations of p (1 + (p - 1) / (p v)) micro-batches of all its stages.

    Args:
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1. If p does not divide it, the last round has gaps.
        stages_per_rank: v, at least 2.

    Raises:
        ScheduleError: A count is too small.

    Source:
        Narayanan et al. 2021, section 2.2.2. Theirs needs m to be a multiple of p; ours makes the
        schedule of the next multiple and leaves out the micro-batches that are not there.
    """
    p, v = num_ranks, stages_per_rank
    check_stages_per_rank("interleaved", v, flat="1f1b")
    return order_rounds(
        "interleaved",
        p,
        num_microbatches,
        # The warm-up of Megatron-LM: 2 (p - 1 - rank) + (v - 1) p forwards before the first pair.
        lambda rank, f, b: alternate(f, b, 2 * (p - 1 - rank) + (v - 1) * p),
        stages_per_rank=v,
    )


def forward_only(rank_of_stage: Sequence[int], num_microbatches: int) -> Schedule:
    """Return the schedule of validation and prediction: every micro-batch forward, in order.

    Each rank runs its forwards in the order of slots in which a micro-batch advances by a stage per
    slot, so that no rank waits for one that waits for it. Micro-batches enter every v slots, or,
    where the stages of a rank are p apart, in rounds of p with v p slots each.

    Args:
        rank_of_stage: The rank that holds each stage.
        num_microbatches: m, at least 1; may be less than the number of stages.

    Raises:
        ScheduleError: There is no stage, or m is less than 1.
    """
    stages = len(rank_of_stage)
    ranks = max(rank_of_stage, default=-1) + 1
    problems = count_problems("forward_only", num_stages=stages, num_microbatches=num_microbatches)
    raise_problems(ScheduleError, "LP402", problems)
    # Stages per rank, and whether they are p apart (interleaved) or in the shape of a V.
    v = -(-stages // ranks)
    in_rounds = stages > ranks and rank_of_stage[ranks] == rank_of_stage[0]

    def enters(i: int) -> int:
        return i // ranks * ranks * v + i % ranks if in_rounds else v * i

    # A stage later is a slot later; at equal slots the later stage first, as others wait for it.
    slots = [(s + enters(i), -s, i) for s in range(stages) for i in range(num_microbatches)]
    order = [Action(-s, _F, i) for _, s, i in sorted(slots)]
    return Schedule(
        name="forward_only",
        num_stages=stages,
        num_microbatches=num_microbatches,
        actions=tuple(
            tuple(a for a in order if rank_of_stage[a.stage] == rank) for rank in range(ranks)
        ),
        rank_of_stage=tuple(rank_of_stage),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """What is known of a training schedule: all that the package has to know, in one row.

    Attributes:
        build: Makes it for p ranks and m micro-batches, and v stages per rank if they are `chosen`.
        peak_in_flight: Of rank r of p with v stages each, the most micro-batches that it holds at
            once, in parts of all its stages; m may be less. It is that of the simulator from 2 p
            micro-batches on.
        idle: Seconds that a rank waits for each of its p - 1 neighbors, from the forward, the
            backward and the weights' part of it, of all stages of a rank, and p; exact where stages
            are equal, and m a multiple of p.
        stages_per_rank: v, or the one that is meant where it is `chosen`.
        chosen: Whether the user chooses v. It needs rounds of p micro-batches: a stage is done with
            one long before its rank is.
        searched: Whether a search for a layout tries it. GPipe and ZB-H2 hold too much;
            DualPipeV waits longer than ZB-V.
    """

    build: Callable[..., Schedule]
    peak_in_flight: Callable[[int, int, int], float]
    idle: Callable[[float, float, float, int], float] = lambda f, b, w, p: f + b
    stages_per_rank: int = 1
    chosen: bool = False
    searched: bool = True


SCHEDULES: Mapping[str, ScheduleSpec] = {
    "1f1b": ScheduleSpec(build=one_f_one_b, peak_in_flight=lambda r, p, v: p - r),
    "dualpipev": ScheduleSpec(
        build=dualpipev,
        peak_in_flight=lambda r, p, v: p + 0.5,
        idle=lambda f, b, w, p: f + b - 2 * w,
        stages_per_rank=2,
        searched=False,
    ),
    "gpipe": ScheduleSpec(build=gpipe, peak_in_flight=lambda r, p, v: math.inf, searched=False),
    "interleaved": ScheduleSpec(
        build=interleaved,
        peak_in_flight=lambda r, p, v: (2 * (p - 1 - r) + (v - 1) * p + 1) / v,
        stages_per_rank=2,
        chosen=True,
    ),
    "interleaved-zb": ScheduleSpec(
        build=interleaved_zb,
        peak_in_flight=lambda r, p, v: (
            p + (further_in_flight(p - 1 - r, p) + further_in_flight(r, p)) / v
        ),
        idle=lambda f, b, w, p: f + b - 2 * w - w * further_in_flight(p - 1, p) / (p - 1),
        stages_per_rank=2,
        chosen=True,
    ),
    "zb-h1": ScheduleSpec(
        build=zb_h1, peak_in_flight=lambda r, p, v: p, idle=lambda f, b, w, p: f + b - 2 * w
    ),
    "zb-h2": ScheduleSpec(
        build=zb_h2,
        peak_in_flight=lambda r, p, v: 2 * p - 1,
        idle=lambda f, b, w, p: f + b - 3 * w,
        searched=False,
    ),
    "zbv": ScheduleSpec(
        build=zbv,
        peak_in_flight=lambda r, p, v: p,
        idle=lambda f, b, w, p: 0.0,
        stages_per_rank=2,
    ),
}
"""The training schedules by name. To add one: a function that builds it, and its row here."""


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return the training schedule called `name`, or read it from the file of that name.

    Args:
        name: A key of `SCHEDULES`, or the path of a file (see `read_schedule`).
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        stages_per_rank: v, for a schedule that lets one choose it; None is its default.

    Raises:
        ScheduleError: No schedule or file has that name, it does not have that number of stages
            per rank, or a count is less than 1.
    """
    if name not in SCHEDULES:
        if not Path(name).is_file():
            raise ScheduleError(
                "LP401",
                f"schedule={name!r} is neither the name of a schedule nor a file. The names "
                f"are {', '.join(sorted(SCHEDULES))}.",
            )
        return read_schedule(name, num_ranks, num_microbatches)
    spec = SCHEDULES[name]
    if spec.chosen and stages_per_rank is not None:
        return spec.build(num_ranks, num_microbatches, stages_per_rank)
    if stages_per_rank not in (None, spec.stages_per_rank):
        free = either([repr(other) for other, row in SCHEDULES.items() if row.chosen])
        raise ScheduleError(
            "LP401",
            f"schedule={name!r} always has {spec.stages_per_rank} stage(s) per rank, but "
            f"{stages_per_rank} were asked for. Use schedule={free} to choose the number of "
            "stages per rank.",
        )
    return spec.build(num_ranks, num_microbatches)


def place_stages(
    name: str, num_ranks: int, stages_per_rank: int | None = None, *, num_microbatches: int = 1
) -> tuple[int, ...]:
    """Return the rank that holds each stage; the arguments are those of `build_schedule`.

    One rank is no pipeline: it holds the whole model as one stage, whatever the schedule.

    Raises:
        ScheduleError: As `build_schedule`; one written by hand may have too few micro-batches.
    """
    if num_ranks == 1:
        return (0,)
    return build_schedule(name, num_ranks, num_microbatches, stages_per_rank).rank_of_stage


def splits_backward(name: str, num_ranks: int) -> bool:
    """Return whether some backward of the schedule called `name` comes in two halves."""
    return build_schedule(name, num_ranks, 1).splits_backward


def read_schedule(path: str | Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """Read a schedule that was written by hand, and check that it can run.

    The file has a line per rank with its actions in order, such as ``0F0 0F1 0B0 0B1``; what
    follows a ``#`` is a comment. A rank holds the stages whose actions it runs.

    Args:
        path: A text file.
        num_ranks: p, the lines that it must have.
        num_microbatches: m; the file must have as many, and if it has more, the first are run.

    Raises:
        ScheduleError: The file cannot be read, does not fit, or could not run; every problem.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            "LP401",
            f"schedule={str(path)!r} cannot be read: {error}. Pass the path of a text file with "
            "one line of actions for each pipeline rank.",
        ) from error
    # Comments and empty lines are for the reader of the file.
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    rows = [parse_actions(" ".join(words)) for words in lines if words]
    if len(rows) != num_ranks:
        raise ScheduleError(
            "LP401",
            f"the schedule file {path} has {len(rows)} lines with actions, but there are "
            f"{num_ranks} pipeline ranks. Write one line for each rank.",
        )
    # A stage that is on two ranks is found by `validate_schedule`: one of its actions is foreign.
    owners = {a.stage: rank for rank, row in enumerate(rows) for a in row}
    missing = sorted(set(range(max(owners) + 1)) - owners.keys())
    if missing:
        raise ScheduleError(
            "LP401",
            f"the schedule file {path} has no action of stage {missing[0]}, but one of stage "
            f"{max(owners)}. Number the stages from 0 without gaps.",
        )
    schedule = Schedule(
        name=Path(path).name,
        num_stages=len(owners),
        num_microbatches=1 + max(a.microbatch for row in rows for a in row),
        actions=tuple(rows),
        rank_of_stage=tuple(owners[stage] for stage in range(len(owners))),
    )
    # At its full length: without its last micro-batches an order that can run still can.
    validate_schedule(schedule)
    if schedule.num_microbatches < num_microbatches:
        raise ScheduleError(
            "LP402",
            f"the schedule file {path} has actions of {schedule.num_microbatches} micro-batches, "
            f"but num_microbatches={num_microbatches}. Use "
            f"num_microbatches={schedule.num_microbatches} or less.",
        )
    return schedule.first(num_microbatches)
