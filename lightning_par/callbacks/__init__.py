"""Callbacks that say where the time, the bytes and the memory of a step go."""

from lightning_par.callbacks.pipeline_profiler import PipelineProfiler

__all__ = ["PipelineProfiler"]
