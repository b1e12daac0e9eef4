"""Refuses steps whose numbers come from the number of processes.

A step may count the replicas, among which samples are divided: where the mesh has no other ranks,
what it reads is their number. With others beside them, a look at the step runs once more as if the
replicas were all processes.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch.distributed as dist

from lightning_par.errors import ConfigurationError
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.world_size import noting_world_size
from lightning_par.strategies.step.look.loss_rule import Seen

__all__ = ["compares_world_sizes"]

Look = Callable[..., tuple[Seen, bool]]


def compares_world_sizes(sizes_of: Callable[[Any], ParallelSizes]) -> Callable[[Look], Look]:
    """Decorate a method that runs a step without a trace, whose first argument is its name, so that
    it refuses losses and logged numbers that depend on the number of processes.

    Args:
        sizes_of: Object with the method -> sizes of the mesh.
    """

    def decorate(method: Look) -> Look:
        @wraps(method)
        def look(runner: Any, name: str, *args: Any, **kwargs: Any) -> tuple[Seen, bool]:
            sizes, run = sizes_of(runner), partial(method, runner, name, *args, **kwargs)
            # Samples that are made up, and divided ones, may fail on some ranks alone.
            is_extra = kwargs.get("made") or kwargs.get("group") is not None
            return run() if is_extra or sizes.data == sizes.world_size else _look(name, sizes, run)

        return look

    return decorate


def _look(
    step: str, sizes: ParallelSizes, look: Callable[[], tuple[Seen, bool]]
) -> tuple[Seen, bool]:
    places: list[str] = []
    with noting_world_size(places):
        found = look()
    read = _gathered(next(iter(places), ""))
    if not read:
        return found
    with noting_world_size([], sizes.data):
        other = look()
    pairs = list(zip(_seen(found[0]), _seen(other[0]), strict=False))
    again = _seen(look()[0])  # a time that is logged differs by itself
    text = next(
        (
            f"{name}={value:.6g} from the number of processes ({read}), {sizes.world_size} on "
            f"{sizes}; with {sizes.data}, the number of replicas, it is {counted:.6g}"
            for ((name, value), (_, counted)), (_, same) in zip(pairs, again, strict=False)
            if not math.isclose(value, counted, rel_tol=1e-6) and value == value == same
        ),
        "",
    )
    text = _gathered(text)
    if text:
        raise ConfigurationError(
            "LP416",
            f"{step} computes {text}. Ranks of one replica have the same samples, so that the run "
            "would train or log otherwise than one process with the same global batch. Leave the "
            "number of processes out: losses and means are those of the global batch already; or "
            "count the replicas, which are 1 on one process, by "
            "self.all_gather(torch.ones(1, device=self.device)).numel(). No weight was changed.",
        )
    return found


def _seen(seen: Seen) -> list[tuple[str, float]]:
    losses = [("the loss", loss) for each in seen.losses for loss in each]
    return losses + [(call.name, float(call.value)) for calls in seen.logs for call in calls]


def _gathered(text: str) -> str:
    """Return the text of the first rank that has one; the same on every rank."""
    every: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(every, text)
    return next(filter(None, every), "")
