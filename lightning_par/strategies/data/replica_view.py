"""What a stream sees while it is made and iterated: the rank and the number of its replica.

The ranks of one replica use the batches of its first. A stream that divides itself by the ranks of
the run would lose the parts of the others.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

import torch.distributed as dist

from lightning_par.upstream.functions import copied_function, diverted

__all__ = ["as_replica"]


@contextmanager
def as_replica(rank: int, size: int) -> Iterator[None]:
    """Inside, code of data sets is told a replica's rank and their number where libraries look:
    `torch.distributed.get_rank` and `get_world_size`, ``RANK`` and ``WORLD_SIZE``. Workers that
    are started inside are told so as long as they live.

    Args:
        rank: Of this replica.
        size: Number of replicas.
    """
    kept = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    with ExitStack() as stack:
        for function, value in ((dist.get_rank, rank), (dist.get_world_size, size)):
            # The function itself, as libraries import it by name.
            stack.enter_context(diverted(function, _told(function, value)))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        try:
            yield
        finally:
            for name, before in kept.items():
                os.environ.pop(name) if before is None else os.environ.update({name: before})


def _told(function: Callable[..., Any], value: int) -> Callable[..., int]:
    """Return a function that gives `value` to the code of data sets, in this thread only: others
    save checkpoints, or watch ranks.
    """
    original, thread = copied_function(function), threading.get_ident()

    def tell(group: Any = None) -> int:
        # torch's own code needs the real rank, as for its collectives.
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        is_of_run = group is None or group is dist.group.WORLD
        if is_of_run and threading.get_ident() == thread and not caller.startswith("torch."):
            return value
        return int(original(group))

    return tell
