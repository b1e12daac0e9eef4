"""Rules of schedules; each yields a sentence for every action that breaks it.

Note [Messages carry no number]: between two ranks, activations travel in one queue and gradients in
another, and what a rank receives is what was sent first. The rank that sends and the one that
receives must therefore have the micro-batches in the same order, or one would be taken for another.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from lightning_par.engine.pipeline.actions import Action, ActionKind, Schedule

__all__ = [
    "crossed_messages",
    "early_actions",
    "foreign_actions",
    "inputs_of",
    "missing_actions",
]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def inputs_of(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """Return the inputs of an action: one of each tuple (an input gradient comes from B or from I).

    Args:
        action: An action of a schedule.
        num_stages: Number of stages of this schedule.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is _F:
        return [(Action(stage - 1, _F, microbatch),)] if stage > 0 else []
    if action.kind is _W:
        return [(Action(stage, _I, microbatch),)]
    # A backward needs its own forward, and the gradient of the stage behind.
    needs: list[tuple[Action, ...]] = [(Action(stage, _F, microbatch),)]
    if stage < num_stages - 1:
        needs.append(tuple(Action(stage + 1, kind, microbatch) for kind in (_B, _I)))
    return needs


def foreign_actions(schedule: Schedule, training: bool) -> Iterator[str]:
    """Yield a problem for every action that does not exist, or belongs to another rank."""
    name, stages, microbatches = schedule.name, schedule.num_stages, schedule.num_microbatches
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            inside = 0 <= action.stage < stages and 0 <= action.microbatch < microbatches
            if not inside:
                yield (
                    f"schedule {name}: rank {rank} runs {action}, but there are only {stages} "
                    f"stages and {microbatches} micro-batches, numbered from 0."
                )
            elif (owner := schedule.rank_of_stage[action.stage]) != rank:
                yield (
                    f"schedule {name}: rank {rank} runs {action}, but rank {owner} holds this "
                    f"stage. Move the action to rank {owner}."
                )
            elif not training and action.kind is not _F:
                yield (
                    f"schedule {name}: rank {rank} runs {action}, but without training only "
                    "forwards run. Remove the action."
                )


def missing_actions(schedule: Schedule, training: bool) -> Iterator[str]:
    """Yield a problem for every action that is missing, repeated, or both whole and split."""
    name = schedule.name
    counts = Counter(action for actions in schedule.actions for action in actions)
    for action, count in counts.items():
        if count > 1:
            yield f"schedule {name}: the action {action} is listed {count} times. List it once."
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        if Action(stage, _F, microbatch) not in counts:
            yield f"schedule {name}: the action {Action(stage, _F, microbatch)} is missing. Add it."
        whole = Action(stage, _B, microbatch)
        halves = [Action(stage, kind, microbatch) for kind in (_I, _W)]
        there = [half for half in halves if half in counts]
        if whole in counts and there:
            yield (
                f"schedule {name}: {whole} and {there[0]} compute the same gradient. Keep one of "
                "the two."
            )
        elif training and whole not in counts and not there:
            yield f"schedule {name}: the action {whole} is missing. Add it."
        elif len(there) == 1:
            missing = next(half for half in halves if half not in counts)
            yield (
                f"schedule {name}: {there[0]} is one half of a backward, but the other half "
                f"{missing} is missing. Add it."
            )


def early_actions(schedule: Schedule) -> Iterator[str]:
    """Yield a problem for every action that comes before one of its stage that it needs."""
    for rank, actions in enumerate(schedule.actions):
        position = {action: index for index, action in reversed(list(enumerate(actions)))}
        for action, index in position.items():
            for choices in inputs_of(action, schedule.num_stages):
                # Of the other stages nothing is said here: a deadlock tells of them.
                needed = choices[0]
                if needed.stage == action.stage and position.get(needed, -1) > index:
                    yield (
                        f"schedule {schedule.name}: rank {rank} runs {action} before {needed}, "
                        "whose result it needs. Swap the two actions."
                    )


def crossed_messages(schedule: Schedule) -> Iterator[str]:
    """Yield a problem for messages that are received in another order than they are sent.

    See Note [Messages carry no number]. The schedule must break no other rule.
    """
    sent, taken = defaultdict(list), defaultdict(list)
    owners, last = schedule.rank_of_stage, schedule.num_stages - 1
    for actions in schedule.actions:
        for action in actions:
            stage, number = action.stage, action.microbatch
            if action.kind is _F and stage < last:
                sent[_queue("activations", owners, stage, stage + 1)].append((stage, number))
            if action.kind is _F and stage > 0:
                taken[_queue("activations", owners, stage - 1, stage)].append((stage - 1, number))
            if action.kind.gives_input_gradient and stage > 0:
                sent[_queue("gradients", owners, stage, stage - 1)].append((stage, number))
            if action.kind.gives_input_gradient and stage < last:
                taken[_queue("gradients", owners, stage + 1, stage)].append((stage + 1, number))
    for queue, order in sent.items():
        for (stage, number), (stage_taken, number_taken) in zip(order, taken[queue], strict=True):
            if (stage, number) != (stage_taken, number_taken):
                kind, source, target, _ = queue
                yield (
                    f"schedule {schedule.name}: rank {source} sends the {kind} of stage {stage} "
                    f"and micro-batch {number}, but at this place rank {target} receives those of "
                    f"stage {stage_taken} and micro-batch {number_taken}. Use the same order of "
                    "stages and micro-batches on both ranks."
                )
                break


def _queue(
    kind: str, owners: tuple[int, ...], source: int, target: int
) -> tuple[str, int, int, int | None]:
    """Return the queue between two stages; within a rank, every link has its own."""
    ranks = owners[source], owners[target]
    # Between ranks one queue for each direction, as one group carries all its messages.
    return (kind, *ranks, source if ranks[0] == ranks[1] else None)
