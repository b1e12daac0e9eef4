"""What a model will hold on a mesh, before anything runs."""

from torch import nn

from lightning_par.engine.memory.estimate import MemoryEstimate
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.setup.checks import check_module
from lightning_par.strategies.setup.memory_check import MemoryCheck

__all__ = ["memory_check", "memory_estimate"]


def memory_estimate(model: nn.Module, strategy: MeshStrategy) -> MemoryEstimate:
    """Return the bytes that the fullest rank will hold, on its device and on its host, by kind.

    Args:
        model: Whole, as the user made it; parameters may be on meta.
        strategy: A strategy that a Trainer has, so that it knows the devices.

    Raises:
        PlanError: The model does not fit the mesh.
    """
    return memory_check(model, strategy).estimate()


def memory_check(model: nn.Module, strategy: MeshStrategy) -> MemoryCheck:
    """Return what a run of `model` would hold, and whether that fits; see `memory_estimate`.

    Raises:
        PlanError: The model does not fit the mesh.
    """
    return MemoryCheck(
        module=model,
        resolved=check_module(model, strategy.options, strategy.sizes),
        options=strategy.options,
        sizes=strategy.sizes,
        precision=strategy.precision_plugin.precision,
        ranks_per_host=strategy.processes.num_local,
    )
