"""Refuses optimizers whose numbers come from the number of processes, which is 1 on one.

`configure_optimizers` runs again as in one process. `setup` runs only once, as it may load models
or wait for other ranks: what it computes from the number of processes is followed in its source,
and `configure_optimizers` runs again with another number in its place.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any, NoReturn

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lightning_par.errors import ConfigurationError
from lightning_par.observe.isolate import isolated
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.world_size import noting_world_size
from lightning_par.strategies.setup.value_flow import attributes_made_of, Place, places_of

__all__ = ["check_world_reads", "note_setup"]

_READS = "_lightning_par_reads"
"""Attribute of a Trainer: what `note_setup` has noted."""
_STEPS = [2**power for power in range(21)]
"""For which functions of learning rates are compared."""

_Make = Callable[[pl.Trainer], None]


class _Reads:
    """Where `setup` of the user's objects reads the number of processes.

    Attributes:
        texts: Where each is.
        places: The expression of each, and those of its callers.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.places: list[list[Place]] = []

    def setup(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Run `setup` of an object, which hid the method of its class until now."""
        del vars(owner)["setup"]
        with noting_world_size(self.texts, seen=lambda it: self.places.append(places_of(it))):
            owner.setup(*args, **kwargs)


def note_setup(trainer: pl.Trainer) -> None:
    """Note for `check_world_reads` where the next `setup` of the module, the data module and the
    callbacks reads the number of processes.
    """
    if trainer.state.fn != "fit":
        return
    reads = vars(trainer)[_READS] = _Reads()
    for owner in _owners(trainer):
        # One of its own stays; a partial is left of a run that has failed.
        if isinstance(vars(owner).get("setup", partial(reads.setup)), partial):
            vars(owner)["setup"] = partial(reads.setup, owner)


def _owners(trainer: Any) -> list[Any]:
    data = getattr(trainer, "datamodule", None)
    return [trainer.lightning_module, *([] if data is None else [data]), *trainer.callbacks]


def check_world_reads(make: _Make, trainer: pl.Trainer) -> None:
    """Make optimizers; where `configure_optimizers` reads the number of processes, make others as
    one process would, and compare learning rates, lengths of schedules and the like. Where `setup`
    computes a number from it, make others with another number, and see what depends on it.

    Args:
        make: Calls `configure_optimizers`.
        trainer: Has the first ones afterwards.

    Raises:
        ConfigurationError: They differ.
    """
    places: list[str] = []
    with noting_world_size(places):
        make(trainer)
    if places:
        for found in _differing(make, trainer, noting_world_size([], 1)):
            _refuse(places[0], *found)
    reads: _Reads | None = vars(trainer).pop(_READS, None)
    if reads is not None and reads.texts:
        _check_setup(make, trainer, reads)


def _check_setup(make: _Make, trainer: pl.Trainer, reads: _Reads) -> None:
    strategy: Any = trainer.strategy
    hooks = [type(owner).setup for owner in _owners(trainer)]
    own = [hook for hook in hooks if not hook.__module__.startswith("lightning.")]
    files = [inspect.unwrap(hook).__code__.co_filename for hook in own]
    sizes, names = strategy.sizes, attributes_made_of(reads.places, files)
    for owner in _owners(trainer):
        # Where they are sorted, each rank refuses the same.
        for held, name in [(each, n) for each in _held(owner) for n in sorted(names & each.keys())]:
            other, differing = _other(held[name], sizes.world_size), []
            if other is not None:
                with suppress(Exception):  # of the user's code, to which the number means more
                    differing = _differing(make, trainer, _replaced(held, name, other))
            for (option, value, is_schedule), _ in differing:
                # With replicas only, as many batches of a replica are a global batch.
                if not is_schedule or sizes.data != sizes.world_size:
                    told = f"{type(owner).__name__}.{name}", reads.texts[0], sizes
                    _refuse_setup(*told, f"{option}={value}", is_schedule)


def _held(owner: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object, then those of what it holds, and dicts."""
    yield vars(owner)
    for value in list(vars(owner).values()):
        held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(held, dict) and not isinstance(value, pl.Trainer):
            yield held


def _other(value: Any, world: int) -> Any:
    """Return another number, or others of a container; None if there is none in it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 1 if value == world else value // 2 or 2
    if isinstance(value, float):
        return value / 2 or 1.0
    if isinstance(value, list | tuple):
        others = [_other(item, world) for item in value]
        return None if None in others else type(value)(others)
    if isinstance(value, dict):
        return {key: _other(item, world) or item for key, item in value.items()}
    return None


@contextmanager
def _replaced(held: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    kept, held[name] = held[name], value
    try:
        yield
    finally:
        held[name] = kept


def _differing(
    make: _Make, trainer: pl.Trainer, change: AbstractContextManager[None]
) -> list[tuple["_Named", "_Named"]]:
    """Return the numbers of optimizers and schedules, with those after a change, where they differ.

    Only to compare: the module and the Trainer keep what the first call has made.
    """
    strategy: Any = trainer.strategy
    kept = strategy.optimizers, strategy.lr_scheduler_configs
    with isolated(strategy.lightning_module):
        here = list(_numbers(*kept))
    try:
        with change, isolated(strategy.lightning_module):
            make(trainer)
            others = list(_numbers(strategy.optimizers, strategy.lr_scheduler_configs))
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = kept
    return [pair for pair in zip(here, others, strict=False) if pair[0] != pair[1]]


def _refuse(place: str, here: "_Named", alone: "_Named") -> NoReturn:
    (name, value, is_schedule), one = here, alone[1]
    if is_schedule:
        raise ConfigurationError(
            "LP416",
            f"configure_optimizers computes {name}={value} of a learning-rate schedule from the "
            f"number of processes ({place}); on one process it is {one}. A step trains one "
            "global batch on any number of processes, so the schedule must not depend on this "
            "number. Use trainer.estimated_stepping_batches, or write the number itself.",
        )
    raise ConfigurationError(
        "LP416",
        f"configure_optimizers computes {name}={value} from the number of processes "
        f"({place}); on one process it is {one}, so the result would differ from a run on one "
        f"process with the same global batch. Write {name}={one}, or read the value from a "
        "hyperparameter of the module.",
    )


def _refuse_setup(
    name: str, place: str, sizes: ParallelSizes, used: str, is_schedule: bool
) -> NoReturn:
    if is_schedule:
        raise ConfigurationError(
            "LP416",
            f"setup computes {name} from the number of processes ({place}), and a learning-rate "
            f"schedule of configure_optimizers depends on it ({used}). {sizes} has "
            f"{sizes.world_size} processes, but only {sizes.data} of them get different samples, "
            "so the schedule would differ from that of a run on one process with the same global "
            "batch. Use trainer.estimated_stepping_batches, or write the number itself.",
        )
    raise ConfigurationError(
        "LP416",
        f"setup computes {name} from the number of processes ({place}), and an option of the "
        f"optimizer depends on it ({used}). On one process the number of processes is 1, so the "
        "result would differ from a run on one process with the same global batch. Write the "
        "value of one process, or read it from a hyperparameter of the module.",
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
            # A schedule may have multiplied the learning rate already.
            for name, value in {**group, "lr": group.get("initial_lr", group["lr"])}.items():
                if isinstance(value, int | float | tuple):
                    yield name, value, False
                elif isinstance(value, Tensor):
                    yield name, value.tolist(), False
    seen = {id(optimizer) for optimizer in optimizers}
    for schedule in schedules:
        yield from ((name, value, True) for name, value in _inside(vars(schedule), "", seen))
        if isinstance(schedule.scheduler, LambdaLR):
            for factor in schedule.scheduler.lr_lambdas:
                yield from (_factor(factor, step) for step in _STEPS)


def _factor(factor: Callable[[int], Any], step: int) -> _Named:
    try:
        return f"lr_lambda({step})", float(factor(step)), True
    except Exception:  # of a table of factors that ends earlier
        return f"lr_lambda({step})", None, True


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
