"""Launching the processes of a node, after what can be checked without them has been checked."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

__all__ = ["PreflightLauncher"]


class PreflightLauncher(_SubprocessScriptLauncher):
    """Starts one process per device, as for DDP; under torchrun or SLURM it starts none.

    Args:
        cluster_environment: Knows the ranks.
        num_processes: Devices on this node.
        num_nodes: Nodes.
        preflight: Called with the trainer and the model before any process starts; raises to stop.

    Attributes:
        weights_only: What the user passed to the Trainer's method under this name.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        preflight: Callable[[pl.Trainer | None, Any], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._preflight = preflight
        self.weights_only: bool | None = None

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self._preflight(trainer, args[0] if args else None)
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        self.weights_only = given.get("weights_only")
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        if not self.procs:
            super()._call_children_scripts()
