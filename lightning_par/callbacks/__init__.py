"""Callbacks that say where the time, the bytes and the memory of a step go."""

from lightning_par.callbacks.communication_profiler import CommunicationProfiler
from lightning_par.callbacks.pipeline_profiler import PipelineProfiler

__all__ = ["CommunicationProfiler", "PipelineProfiler"]
