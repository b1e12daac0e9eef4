"""Where the user's code reads the number of processes."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_par.strategies.processes.world_collectives import user_frame
from lightning_par.upstream.functions import copied_function, diverted, replaced

__all__ = ["noting_world_size"]

_SIZES = ("world_size", "num_devices", "num_nodes")
_VARIABLE = "WORLD_SIZE"


@contextmanager
def noting_world_size(places: list[str], count: int | None = None) -> Iterator[None]:
    """Inside, note where code of the user's reads the number of processes; it reads at most
    `count`, if that is given.

    Args:
        places: Gets a text for each.
        count: The largest number that it reads.
    """

    def read(name: str, original: Callable[[], Any]) -> Any:
        frame = user_frame(sys._getframe(2))
        if frame is None:
            return original()
        places.append(f"{name} in line {frame.f_lineno} of {frame.f_code.co_filename}")
        return original() if count is None else min(int(original()), count)

    def of_trainer(name: str) -> property:
        given: Any = getattr(pl.Trainer, name)
        return property(lambda trainer: read(f"trainer.{name}", lambda: given.fget(trainer)))

    sizes = dist.get_world_size
    plain = copied_function(sizes)

    def of_torch(group: Any = None) -> int:
        found = plain(group)
        whole = group is None or group is dist.group.WORLD
        return int(read("dist.get_world_size()", lambda: found)) if whole else found

    environment: Any = type(os.environ)
    variable = environment.__getitem__

    def of_environment(environ: Any, key: str) -> str:
        if key != _VARIABLE:
            return str(variable(environ, key))
        return str(read(f"os.environ[{key!r}]", lambda: variable(environ, key)))

    with ExitStack() as stack:
        stack.enter_context(replaced(environment, "__getitem__", of_environment))
        for name in _SIZES:
            stack.enter_context(replaced(pl.Trainer, name, of_trainer(name)))
        stack.enter_context(diverted(sizes, of_torch))
        yield
