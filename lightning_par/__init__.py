"""N-dimensional parallel training for PyTorch Lightning.

A LightningModule that trains on one device trains, unchanged, on any mesh of devices. Importing
this package registers the strategies ``tensor_parallel``, ``pipeline_1f1b``, ``sequence_ring``,
``hybrid3d``, ``zero_offload``, ``auto_parallel`` and ``islands`` with Lightning.
"""

from typing import Any, TYPE_CHECKING

from lightning_par.registration import register_strategies
from lightning_par.version import __version__

__all__ = [
    "AutoParallelStrategy",
    "BatchLayout",
    "ContextOptions",
    "GradientCompression",
    "Hybrid3DStrategy",
    "IslandsStrategy",
    "LightningParError",
    "Outer",
    "ParallelPlan",
    "ParallelSizes",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
    "ZeROOffloadStrategy",
    "__version__",
    "attention",
    "capture",
    "check_plan",
    "compare",
    "infer_plan",
    "linear_cross_entropy",
    "load_from_checkpoint",
    "memory_estimate",
    "verify",
]

if TYPE_CHECKING:
    from lightning_par import callbacks as callbacks
    from lightning_par import huggingface as huggingface
    from lightning_par import models as models
    from lightning_par import optimizers as optimizers
    from lightning_par import strategies as strategies
    from lightning_par import verification as verification
    from lightning_par.engine.context.attention import attention
    from lightning_par.engine.context.options import ContextOptions
    from lightning_par.engine.data.compression.options import GradientCompression
    from lightning_par.engine.data.islands.options import Outer
    from lightning_par.engine.tensor.chunked_logits import linear_cross_entropy
    from lightning_par.errors import LightningParError
    from lightning_par.inference.infer import infer_plan
    from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
    from lightning_par.plan.resolved_plan import check_plan
    from lightning_par.sizes import ParallelSizes
    from lightning_par.strategies import (
        AutoParallelStrategy,
        Hybrid3DStrategy,
        IslandsStrategy,
        Pipeline1F1BStrategy,
        SequenceRingStrategy,
        TensorParallelStrategy,
        ZeROOffloadStrategy,
    )
    from lightning_par.strategies.components.load_module import load_from_checkpoint
    from lightning_par.strategies.memory_estimate import memory_estimate
    from lightning_par.verification.loops import capture, compare
    from lightning_par.verification.verify import verify
else:
    # Imported when they are asked for (PEP 562): the engine has to work without Lightning.
    _EXPORTS = {
        "AutoParallelStrategy": "strategies",
        "BatchLayout": "plan.parallel_plan",
        "ContextOptions": "engine.context.options",
        "GradientCompression": "engine.data.compression.options",
        "Hybrid3DStrategy": "strategies",
        "IslandsStrategy": "strategies",
        "LightningParError": "errors",
        "Outer": "engine.data.islands.options",
        "ParallelPlan": "plan.parallel_plan",
        "ParallelSizes": "sizes",
        "Pipeline1F1BStrategy": "strategies",
        "SequenceRingStrategy": "strategies",
        "TensorParallelStrategy": "strategies",
        "ZeROOffloadStrategy": "strategies",
        "attention": "engine.context.attention",
        "capture": "verification.loops",
        "check_plan": "plan.resolved_plan",
        "compare": "verification.loops",
        "memory_estimate": "strategies.memory_estimate",
        "linear_cross_entropy": "engine.tensor.chunked_logits",
        "load_from_checkpoint": "strategies.components.load_module",
        "infer_plan": "inference.infer",
        "verify": "verification.verify",
    }
    _PACKAGES = ("callbacks", "huggingface", "models", "optimizers", "strategies", "verification")

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _EXPORTS:
            value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        elif name in _PACKAGES:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_PACKAGES})


register_strategies()
