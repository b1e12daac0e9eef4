"""What a model will hold on a mesh, before anything runs."""

from torch import nn

from lightning_par.engine.memory.estimate import MemoryEstimate
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["memory_estimate"]


def memory_estimate(model: nn.Module, strategy: MeshStrategy) -> MemoryEstimate:
    """Return the bytes that the fullest rank will hold, on its device and on its host, by kind.

    Args:
        model: Whole, as the user made it; parameters may be on meta.
        strategy: A strategy that a Trainer has, so that it knows the devices.

    Raises:
        PlanError: The model does not fit the mesh.
    """
    return strategy.memory_check(model).estimate()
