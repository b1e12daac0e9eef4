"""The faults, by theme; importing this fills `benchmarks.zoo.fault.FAULTS`."""

from benchmarks.zoo.faults import (
    backward,
    batches,
    checkpoints,
    clipping,
    evaluation,
    experts,
    forward,
    products,
    resumes,
    shared,
    updates,
)

__all__ = [
    "backward",
    "batches",
    "checkpoints",
    "clipping",
    "evaluation",
    "experts",
    "forward",
    "products",
    "resumes",
    "shared",
    "updates",
]
