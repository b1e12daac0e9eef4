"""N-dimensional parallel training for PyTorch Lightning.

A LightningModule that trains on one device trains, unchanged, on any mesh of devices. Importing
this package registers the strategies ``tensor_parallel``, ``pipeline_1f1b``, ``sequence_ring``,
``hybrid3d`` and ``zero_offload`` with Lightning.
"""

from lightning_par.engine.context.attention import attention
from lightning_par.engine.context.sequence_shard import ContextOptions
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.errors import LightningParError
from lightning_par.plan import BatchLayout, ParallelPlan
from lightning_par.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies import (
    Hybrid3DStrategy,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    TensorParallelStrategy,
    ZeROOffloadStrategy,
)
from lightning_par.strategies.mesh_strategy import memory_estimate
from lightning_par.verification import verify

__version__ = "0.1.0"

__all__ = [
    "BatchLayout",
    "ContextOptions",
    "GradientCompression",
    "Hybrid3DStrategy",
    "LightningParError",
    "ParallelPlan",
    "ParallelSizes",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
    "ZeROOffloadStrategy",
    "attention",
    "check_plan",
    "memory_estimate",
    "verify",
]
