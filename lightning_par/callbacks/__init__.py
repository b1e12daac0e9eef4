"""Callbacks that say where the time, the bytes and the memory of a step go, and the tokens."""

from lightning_par.callbacks.expert_balance import ExpertBalance
from lightning_par.callbacks.pipeline_profiler import PipelineProfiler

__all__ = ["ExpertBalance", "PipelineProfiler"]
