"""Refuses optimizers whose numbers come from the number of processes, which is 1 on one."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, ExitStack
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.processes.world_collectives import user_frame
from lightning_par.upstream.functions import diverted, replaced

__all__ = ["check_world_reads"]

_SIZES = ("world_size", "num_devices", "num_nodes")


def check_world_reads(make: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
    """Make optimizers; where `configure_optimizers` reads the number of processes, make them once
    more as one process would, and compare learning rates and the like.

    Args:
        make: Calls `configure_optimizers`.
        trainer: Has them afterwards.

    Raises:
        ConfigurationError: They differ.
    """
    places: list[str] = []
    with _noting(places, alone=False):
        make(trainer)
    if not places:
        return
    here = list(_numbers(trainer.optimizers))
    with _noting([], alone=True):
        make(trainer)
    alone = list(_numbers(trainer.optimizers))
    differing = next((pair for pair in zip(here, alone, strict=False) if pair[0] != pair[1]), None)
    if differing is not None:
        (name, value), (_, one) = differing
        raise ConfigurationError(
            "LP416",
            f"configure_optimizers computes {name}={value} from the number of processes "
            f"({places[0]}); on one process it is {one}, so that the run would train otherwise "
            "than one process with the same global batch. Write the number that you want, or take "
            f"it from a hyperparameter of the module: {name}={one} is that of one process.",
        )


@contextmanager
def _noting(places: list[str], *, alone: bool) -> Iterator[None]:
    """Inside, note where code of the user's reads the number of processes, or let it read 1."""

    def read(name: str, original: Callable[[], Any]) -> Any:
        frame = user_frame(sys._getframe(2))
        if frame is None:
            return original()
        places.append(f"{name} in line {frame.f_lineno} of {frame.f_code.co_filename}")
        return 1 if alone else original()

    def of_trainer(name: str) -> property:
        given: Any = getattr(pl.Trainer, name)
        return property(lambda trainer: read(f"trainer.{name}", lambda: given.fget(trainer)))

    sizes = dist.get_world_size
    plain = FunctionType(sizes.__code__, sizes.__globals__, "plain", sizes.__defaults__)

    def of_torch(group: Any = None) -> int:
        found = plain(group)
        whole = group is None or group is dist.group.WORLD
        return int(read("dist.get_world_size()", lambda: found)) if whole else found

    with ExitStack() as stack:
        for name in _SIZES:
            stack.enter_context(replaced(pl.Trainer, name, of_trainer(name)))
        stack.enter_context(diverted(sizes, of_torch))
        yield


def _numbers(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield the options of all groups of parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, int | float | tuple):
                    yield name, value
