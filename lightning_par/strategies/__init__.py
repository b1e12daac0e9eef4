"""Lightning strategies for every mesh; importing this module registers their names."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import (
    Hybrid3DStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    TensorParallelStrategy,
    ZeROOffloadStrategy,
)

__all__ = [
    "Hybrid3DStrategy",
    "MeshStrategy",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
    "ZeROOffloadStrategy",
]

for _strategy in (
    TensorParallelStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    Hybrid3DStrategy,
    ZeROOffloadStrategy,
):
    _summary = (_strategy.__doc__ or "").split("\n")[0]
    _names: dict[str, dict[str, Any]] = {_strategy.strategy_name: {}}
    if _strategy is ZeROOffloadStrategy:
        _names |= {f"zero_offload_stage_{stage}": {"stage": stage} for stage in (1, 2, 3)}
    for _name, _options in _names.items():
        if _name not in StrategyRegistry:
            StrategyRegistry.register(_name, _strategy, description=_summary, **_options)
