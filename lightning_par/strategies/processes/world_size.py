"""Where the user's code reads the number of processes, or which of them it runs in."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy

from lightning_par.strategies.processes.world_collectives import user_frame
from lightning_par.upstream.functions import copied_function, diverted, replaced

__all__ = ["noting_rank", "noting_world_size"]


@dataclass(frozen=True)
class _Number:
    """A number that tells processes apart, and the ways to read it.

    Attributes:
        properties: Class, what its objects are called in a message, and names of properties.
        function: Function of torch, of a group.
        method: Method of a group.
        variables: Variables of the environment.
    """

    properties: Sequence[tuple[type, str, str]]
    function: Callable[..., int]
    method: str
    variables: Sequence[str]


_SIZE = _Number(
    properties=(
        (pl.Trainer, "trainer", "world_size num_devices num_nodes"),
        (ParallelStrategy, "trainer.strategy", "world_size"),
    ),
    function=dist.get_world_size,
    method="size",
    variables=("WORLD_SIZE",),
)
_RANK = _Number(
    properties=(
        (pl.Trainer, "trainer", "global_rank local_rank node_rank is_global_zero"),
        (pl.LightningModule, "self", "global_rank local_rank"),
        (ParallelStrategy, "trainer.strategy", "local_rank node_rank is_global_zero"),
    ),
    function=dist.get_rank,
    method="rank",
    variables=("RANK", "LOCAL_RANK", "NODE_RANK"),
)


def noting_world_size(places: list[str], count: int | None = None) -> Any:
    """Return a context that notes where the user's code reads the number of processes.

    Args:
        places: Receives a text for each read.
        count: The user's code reads this number in place of a larger one; None: the real one.
    """
    return _noting(_SIZE, places, count)


def noting_rank(places: list[str], rank: int | None = None) -> Any:
    """Return a context that notes where the user's code reads its rank.

    Args:
        places: Receives a text for each read.
        rank: The user's code reads this rank in place of a larger one; None: the real one.
    """
    return _noting(_RANK, places, rank)


@contextmanager
def _noting(number: _Number, places: list[str], most: int | None) -> Iterator[None]:
    is_reading = False

    def read(name: str, original: Callable[[], Any]) -> Any:
        nonlocal is_reading
        if is_reading:  # one way reads it by another, and the user's code by the first of them
            return original()
        frame = user_frame(sys._getframe(2))
        is_reading = True
        try:
            found = original()
        finally:
            is_reading = False
        if frame is None:
            return found
        places.append(f"{name} in line {frame.f_lineno} of {frame.f_code.co_filename}")
        if most is None:
            return found
        # `is_global_zero` answers for the rank that is pretended.
        return most == 0 if isinstance(found, bool) else min(int(found), most)

    with _diverted(number, read):
        yield


@contextmanager
def _diverted(number: _Number, read: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Let every way to read a number go by a function, which gets its name and the way itself."""

    def of_object(owner: Any, label: str, name: str) -> property:
        # The property of the class, also an inherited one.
        given = getattr(owner, name)
        return property(lambda it: read(f"{label}.{name}", lambda: given.fget(it)))

    plain, method = copied_function(number.function), getattr(dist.ProcessGroup, number.method)

    def of_torch(group: Any = None) -> Any:
        is_whole = group is None or group is dist.group.WORLD
        name = f"dist.{plain.__name__}()"
        # Sizes of other groups do not tell how many processes there are.
        return read(name, lambda: plain(group)) if is_whole else plain(group)

    def of_group(group: Any) -> Any:
        name = f"dist.group.WORLD.{number.method}()"
        is_whole = group is dist.group.WORLD
        return read(name, lambda: method(group)) if is_whole else method(group)

    environment: Any = type(os.environ)
    variable = environment.__getitem__

    def of_environment(environ: Any, key: str) -> str:
        # Nearly always: reading the environment has to stay cheap.
        if key not in number.variables:
            return str(variable(environ, key))
        return str(read(f"os.environ[{key!r}]", lambda: variable(environ, key)))

    with ExitStack() as stack:
        stack.enter_context(replaced(environment, "__getitem__", of_environment))
        stack.enter_context(replaced(dist.ProcessGroup, number.method, of_group))
        for owner, label, names in number.properties:
            for name in names.split():
                stack.enter_context(replaced(owner, name, of_object(owner, label, name)))
        stack.enter_context(diverted(number.function, of_torch))
        yield
