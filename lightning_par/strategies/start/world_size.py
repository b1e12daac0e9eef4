"""Refuses steps whose numbers come from the number of processes, or from which of them runs.

A step may count the replicas, among which samples are divided, and ask which of them it is: where
the mesh has no other ranks, that is what it reads, and the proof of the first step tells whether
the run equals one process. With others beside them, a look at the step runs once more as if the
replicas were all processes.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.world_size import noting_rank, noting_world_size
from lightning_par.strategies.step.step_report import StepReport

__all__ = ["compares_world_sizes"]

Look = Callable[..., tuple[StepReport, bool]]
Numbers = list[tuple[str, float]]
_LOSS = "the loss"
_CURES = {
    "LP416": (
        "Do not use the number of processes in the computation: losses and logged means are "
        "already those of the global batch. If the number of replicas is needed, use "
        "self.all_gather(torch.ones(1, device=self.device)).numel(), which is 1 on one process."
    ),
    "LP419": (
        "Do not use the rank to compute the loss: one process treats all samples alike. "
        "Random numbers already differ between replicas. Use the rank only to decide which rank "
        "writes files."
    ),
}


def compares_world_sizes(
    about: Callable[[Any], tuple[ParallelMesh, bool]],
) -> Callable[[Look], Look]:
    """Decorate a method that runs a step without a trace, and takes the step's name first.

    The method then refuses a loss or a logged number that depends on the number of processes, and
    a loss that depends on the rank.

    Args:
        about: Object with the method -> its mesh, and whether the first step will be proved to
            equal that of one process.
    """

    def decorate(method: Look) -> Look:
        @wraps(method)
        def look(runner: Any, name: str, *args: Any, **kwargs: Any) -> tuple[StepReport, bool]:
            (mesh, is_proved), sizes = about(runner), about(runner)[0].sizes
            run = partial(method, runner, name, *args, **kwargs)
            # Only replicas: their number is the number of processes, as under DDP.
            is_plain = sizes.data == sizes.world_size
            # Samples that are made up, and divided ones, may fail on some ranks alone.
            is_extra = kwargs.get("made") or kwargs.get("group") is not None
            # Text that is generated stops at other lengths where replicas do not wait for each
            # other, as one process does not: under ZeRO 3 they would gather other weights.
            is_trained = name == "training_step"
            if is_extra or (is_plain and (is_proved or not is_trained)):
                return run()
            return _look(name, mesh, run, is_plain=is_plain)

        return look

    return decorate


def _look(
    step: str, mesh: ParallelMesh, look: Callable[..., tuple[StepReport, bool]], *, is_plain: bool
) -> tuple[StepReport, bool]:
    sizes, places, ranks = mesh.sizes, list[str](), list[str]()
    with noting_world_size(places), noting_rank(ranks):
        # The plain look comes first, and is the one that counts; others only compare.
        found = look()
    # Gathered, as only some ranks may ask: all of them run the look again, or none.
    read, asked = _gathered(next(iter(places), "")), _gathered(next(iter(ranks), ""))
    if not read and not asked:
        return found
    count, place = (1, 0) if is_plain else (sizes.data, mesh.data_group.rank())
    try:
        # Once more without a change: what differs now differs by itself.
        again = _seen(look()[0])  # a time that is logged differs by itself
        # As if it may fail: it may need as many tensors as it has gathered.
        with noting_world_size([], count):
            of_size = look(size=0)[0] if read else found[0]
        of_rank = _as_rank(look, place) if asked else found[0]
    except ConfigurationError as error:
        if not is_plain:
            raise
        _warn(step, read or asked, str(error))
        return found
    # Ranks may see other differences: the first one speaks for all.
    text, code = _gathered(_of_size(found[0], of_size, again, read, sizes, count)), "LP416"
    if not text:
        text, code = _gathered(_of_rank(found[0], of_rank, again, asked, mesh, place)), "LP419"
    if text and is_plain:
        _warn(step, read if code == "LP416" else asked, text)
    elif text:
        raise ConfigurationError(
            code,
            f"{step} computes {text}. The ranks of one replica compute the same samples, so the "
            "result would differ from a run on one process with the same global batch. "
            f"{_CURES[code]} No weight was changed.",
        )
    return found


def _as_rank(look: Callable[..., tuple[StepReport, bool]], place: int) -> StepReport | None:
    """Return what a step computes that reads another rank; None if it fails as that rank, such as
    where only rank 0 has made what it uses.
    """
    try:
        with noting_rank([], place):
            return look(size=0)[0]
    except ConfigurationError:
        return None


def _of_size(
    here: StepReport, other: StepReport, again: Numbers, read: str, sizes: ParallelSizes, count: int
) -> str:
    """Return which number comes from the number of processes; empty if none does."""
    for name, value, counted in _differing(_seen(here), _seen(other), again):
        replicas = "1" if count == 1 else f"{count}, the number of replicas,"
        return (
            f"{name}={value:.6g} from the number of processes ({read}), which is "
            f"{sizes.world_size} on {sizes}; with {replicas} the value is {counted:.6g}"
        )
    return ""


def _of_rank(
    here: StepReport,
    other: StepReport | None,
    again: Numbers,
    asked: str,
    mesh: ParallelMesh,
    place: int,
) -> str:
    """Return which loss comes from the rank; empty if none does, or if that is not known."""
    if other is None:
        return ""
    losses = [pair for pair in _seen(here) if pair[0] == _LOSS]
    for name, value, counted in _differing(losses, _seen(other), again):
        return (
            f"{name} from the rank of the process ({asked}): on {mesh.sizes}, the loss of rank "
            f"{mesh.rank} is {value:.6g}, and with rank {place} it would be {counted:.6g}"
        )
    return ""


def _warn(step: str, read: str, text: str) -> None:
    rank_zero_warn(
        f"{step} uses the number of processes or the rank ({read}): {text}. Whether a run on one "
        "process with the same global batch gives the same result is not known; "
        'verify="first_step" compares the two. Losses and logged means are already those of the '
        "global batch, so they need no factor."
    )


def _differing(pairs: Numbers, others: Numbers, again: Numbers) -> list[tuple[str, float, float]]:
    """Return the names and both values of the numbers that differ, and not by themselves."""
    return [
        (name, value, other)
        for (name, value), (_, other), (_, same) in zip(pairs, others, again, strict=False)
        # NaN is left out; so is what the second plain look gave otherwise.
        if not math.isclose(value, other, rel_tol=1e-6) and value == value == same
    ]


def _seen(seen: StepReport) -> Numbers:
    losses = [(_LOSS, loss) for each in seen.losses for loss in each]
    return losses + [(call.name, float(call.value)) for calls in seen.logs for call in calls]


def _gathered(text: str) -> str:
    """Return the text of the first rank that has one; the same on every rank."""
    every: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(every, text)
    return next(filter(None, every), "")
