"""Lightning strategies for every mesh; importing this module registers their names."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_par.strategies.base import MeshStrategy
from lightning_par.strategies.presets import (
    Hybrid3DStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    TensorParallelStrategy,
)

__all__ = [
    "Hybrid3DStrategy",
    "MeshStrategy",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
]

for _strategy in (
    TensorParallelStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    Hybrid3DStrategy,
):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            _strategy.strategy_name, _strategy, description=(_strategy.__doc__ or "").split("\n")[0]
        )
