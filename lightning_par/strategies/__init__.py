"""Lightning strategies for every mesh; `lightning_par.registration` registers their names."""

from lightning_par.strategies.auto.strategy import AutoParallelStrategy
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import (
    Hybrid3DStrategy,
    IslandsStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    TensorParallelStrategy,
    ZeROOffloadStrategy,
)

__all__ = [
    "AutoParallelStrategy",
    "Hybrid3DStrategy",
    "IslandsStrategy",
    "MeshStrategy",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
    "ZeROOffloadStrategy",
]
