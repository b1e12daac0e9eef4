"""The named strategies: presets of `MeshStrategy`, which may all be combined."""

from typing import ClassVar

from lightning_par.sizes import AutoRule
from lightning_par.strategies.base import MeshStrategy

__all__ = ["Hybrid3DStrategy", "Pipeline1F1BStrategy", "TensorParallelStrategy"]


class TensorParallelStrategy(MeshStrategy):
    """Tensor parallelism: every layer is sharded over the devices of a node.

    "auto": ``tensor_parallel_size`` takes all devices of a node, ``pipeline_parallel_size`` is 1,
    and ``data_parallel_size`` is what is left, the number of nodes. The arguments are those of
    `MeshStrategy`.
    """

    strategy_name: ClassVar[str] = "tensor_parallel"
    _auto_rule: ClassVar[AutoRule] = "tensor"


class Pipeline1F1BStrategy(MeshStrategy):
    """Pipeline parallelism with the one-forward-one-backward schedule: the blocks are cut into
    stages.

    "auto": ``pipeline_parallel_size`` takes all devices, the others are 1. The arguments are those
    of `MeshStrategy`.
    """

    strategy_name: ClassVar[str] = "pipeline_1f1b"
    _auto_rule: ClassVar[AutoRule] = "pipeline"


class Hybrid3DStrategy(MeshStrategy):
    """Tensor, pipeline and data parallelism together.

    "auto": ``tensor_parallel_size`` is 2 where the devices of a node are even, then
    ``pipeline_parallel_size`` is 2 where what is left is even, and ``data_parallel_size`` is the
    rest: 2 devices are tp 2, 4 are tp 2 x pp 2, 8 are tp 2 x pp 2 x dp 2, and on 1 device every
    size is 1. The arguments are those of `MeshStrategy`.
    """

    strategy_name: ClassVar[str] = "hybrid3d"
    _auto_rule: ClassVar[AutoRule] = "balanced"
