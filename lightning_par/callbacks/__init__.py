"""Callbacks: activation checkpointing, mixed precision, profilers, monitors, sampled texts and a
proof.
"""

from lightning_par.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_par.callbacks.communication_profiler import CommunicationProfiler
from lightning_par.callbacks.expert_balance import ExpertBalance
from lightning_par.callbacks.first_step_proof import FirstStepProof
from lightning_par.callbacks.island_monitor import IslandMonitor
from lightning_par.callbacks.memory_monitor import MemoryMonitor
from lightning_par.callbacks.mixed_precision import MixedPrecision
from lightning_par.callbacks.pipeline_profiler import PipelineProfiler
from lightning_par.callbacks.sample_text import SampleText
from lightning_par.callbacks.throughput_monitor import ThroughputMonitor

__all__ = [
    "ActivationCheckpointing",
    "CommunicationProfiler",
    "ExpertBalance",
    "FirstStepProof",
    "IslandMonitor",
    "MemoryMonitor",
    "MixedPrecision",
    "PipelineProfiler",
    "SampleText",
    "ThroughputMonitor",
]
