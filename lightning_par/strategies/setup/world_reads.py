"""Refuses optimizers whose numbers come from the number of processes, which is 1 on one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_par.errors import ConfigurationError
from lightning_par.observe.isolate import isolated
from lightning_par.strategies.processes.world_size import noting_world_size

__all__ = ["check_world_reads"]


def check_world_reads(make: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
    """Make optimizers; where `configure_optimizers` reads the number of processes, make others as
    one process would, and compare learning rates, lengths of schedules and the like.

    Args:
        make: Calls `configure_optimizers`.
        trainer: Has the first ones afterwards.

    Raises:
        ConfigurationError: They differ.
    """
    places: list[str] = []
    with noting_world_size(places):
        make(trainer)
    if not places:
        return
    strategy: Any = trainer.strategy
    kept = strategy.optimizers, strategy.lr_scheduler_configs
    here = list(_numbers(*kept))
    try:
        # Only to compare: the module and the Trainer keep what the first call has made.
        with isolated(strategy.lightning_module), noting_world_size([], 1):
            make(trainer)
        alone = list(_numbers(strategy.optimizers, strategy.lr_scheduler_configs))
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = kept
    differing = next((pair for pair in zip(here, alone, strict=False) if pair[0] != pair[1]), None)
    if differing is None:
        return
    (name, value, is_schedule), (_, one, _) = differing
    if is_schedule:
        raise ConfigurationError(
            "LP416",
            f"configure_optimizers computes {name}={value} of a learning-rate schedule from the "
            f"number of processes ({places[0]}); on one process it is {one}. A step trains one "
            "global batch on any number of processes, so the schedule must not depend on this "
            "number. Use trainer.estimated_stepping_batches, or write the number itself.",
        )
    raise ConfigurationError(
        "LP416",
        f"configure_optimizers computes {name}={value} from the number of processes "
        f"({places[0]}); on one process it is {one}, so the result would differ from a run on one "
        f"process with the same global batch. Write {name}={one}, or read the value from a "
        "hyperparameter of the module.",
    )


_Named = tuple[str, Any, bool]
"""Name of a number, the number, and whether it is of a schedule."""


def _numbers(optimizers: Iterable[Optimizer], schedules: Iterable[Any]) -> Iterator[_Named]:
    """Yield the options of all groups of parameters, then the numbers of learning rate schedules.

    Args:
        optimizers: Of the Trainer.
        schedules: Lightning's configurations of the schedules.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, int | float | tuple):
                    yield name, value, False
                elif isinstance(value, Tensor):
                    yield name, value.tolist(), False
    seen = {id(optimizer) for optimizer in optimizers}
    for schedule in schedules:
        yield from ((name, value, True) for name, value in _inside(vars(schedule), "", seen))


def _inside(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a schedule, by name, and those in its functions and in parts of it."""
    if isinstance(value, int | float):
        yield name, value
    # A schedule refers to its optimizer, which is in `seen`, and perhaps to itself.
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, item in _items(value):
        yield from _inside(item, key or name, seen)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((str(key), item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (("", item) for item in value)
    if isinstance(value, partial):
        return (("", value.func), ("", value.args), ("", value.keywords))
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # One whose name is not set yet is equal to an empty one, and has no contents.
        return ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    return vars(value).items() if isinstance(value, LRScheduler | ReduceLROnPlateau) else ()
