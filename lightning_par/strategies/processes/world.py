"""The other ranks of a run, as a value: real ones, or in a rehearsal none at all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lightning_par.engine.pipeline.executor import PipelineExecutor
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.tensor_tree import TreeBroadcast
from lightning_par.strategies.processes.host_status import OtherHost
from lightning_par.strategies.processes.rank_status import RankStatusFile
from lightning_par.strategies.processes.watchdog import open_status_file

__all__ = ["RealWorld", "World"]


class World(Protocol):
    """The other ranks, as `MeshProcesses` hands them to what depends on their being there."""

    @property
    def has_values(self) -> bool:
        """Whether losses have the values that they have in a run."""

    @property
    def channel(self) -> type[Channel]:
        """Class of the channels to stages of other ranks."""

    @property
    def executor(self) -> Callable[..., PipelineExecutor]:
        """Makes what runs the stages of this rank; takes what `PipelineExecutor` does."""

    @property
    def broadcast(self) -> Callable[[dist.ProcessGroup, int], TreeBroadcast]:
        """Makes a broadcast of trees in a group, from a global rank."""

    def timeout(self, chosen: timedelta | None) -> timedelta | None:
        """Return the timeout of the groups of the mesh, for the one that the user chose."""

    def open_status_file(self, *given: Any) -> tuple[RankStatusFile | None, list[OtherHost]]:
        """Do what the function `open_status_file` does; without a file nobody is watched."""


class RealWorld:
    """All ranks of the run are there."""

    has_values = True
    channel = Channel
    executor = PipelineExecutor
    broadcast = TreeBroadcast
    open_status_file = staticmethod(open_status_file)

    def timeout(self, chosen: timedelta | None) -> timedelta | None:
        """Return the one that the user chose."""
        return chosen
