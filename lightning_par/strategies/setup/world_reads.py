"""Refuses optimizers whose numbers come from the number of processes, which is 1 on one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.processes.world_size import noting_world_size

__all__ = ["check_world_reads"]


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
    with noting_world_size(places):
        make(trainer)
    if not places:
        return
    # Read before the second call, which puts other optimizers into the Trainer.
    here = list(_numbers(trainer.optimizers))
    with noting_world_size([], 1):
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


def _numbers(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield the options of all groups of parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, int | float | tuple):
                    yield name, value
