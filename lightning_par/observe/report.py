"""What a run computed in an optimizer step, on the mesh or on one process."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["EvaluationRecord", "StartValues", "StepRecord"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StartValues:
    """What a step started from.

    Attributes:
        tensors: Name -> value of every parameter and buffer, whole; on rank 0.
        global_step: Optimizer steps so far; more than 0 after a checkpoint was loaded.
        epoch: Number of the epoch.
        batch: Number of the first batch in its epoch.
        continues: Whether optimizers and schedulers have taken steps already.
        learns: Whether a learning rate is not 0.
        groups: Numbers of every group of parameters of the optimizers, such as learning rates.
        optimizers: The whole state of every optimizer, as one process has it; on rank 0. None:
            nobody asked for them, or they cannot be gathered.
        put_outside: Puts back what the user's code keeps outside of its module as it was then.
        trains: Names of the parameters that are not frozen; on rank 0. None: those that were not
            when the module was put on the mesh.
        gradients: Name -> gradient that earlier steps have left, whole; on rank 0.
        is_later: Whether the step comes after others of this run, and the hooks before it have run.
    """

    tensors: Mapping[str, Tensor]
    global_step: int
    epoch: int
    continues: bool
    learns: bool = True
    groups: Sequence[Mapping[str, float]] = ()
    optimizers: Sequence[Mapping[str, Any]] | None = None
    put_outside: Callable[[], None] = lambda: None
    trains: frozenset[str] | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    is_later: bool = False
    batch: int = 0


@dataclass(kw_only=True, eq=False)
class StepRecord:
    """What a run computed in an optimizer step; tensors are whole, and on the CPU.

    Attributes:
        losses: Of every backward, weighted over the global batch.
        gradients: After every backward: name -> gradient, where there is one; None while they
            accumulate, or where nobody could see them.
        handed: For every step of an optimizer the gradients that it was handed, after hooks and
            clipping.
        updated: Name -> parameter right after the last of these steps, before hooks that follow.
        state: Name -> parameter or buffer after the step.
        buffers: Names of the buffers.
        trains: Names of the parameters that are not frozen, on one process.
        draws: Whether the step drew random numbers.
        restored: Whether optimizers went on from the states of the mesh, on one process.
        written: Names of parameters to which the forward of their module wrote, on one process.
        error: What ended the run, if it failed.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor] | None] = field(default_factory=list)
    handed: list[dict[str, Tensor]] = field(default_factory=list)
    updated: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    trains: frozenset[str] = frozenset()
    draws: bool = False
    restored: bool = False
    written: set[str] = field(default_factory=set)
    error: BaseException | None = None

    @property
    def is_finite(self) -> bool:
        """Whether every loss and gradient is."""
        # None: not seen, which is no sign of trouble.
        found = [g for gradients in self.gradients for g in (gradients or {}).values()]
        return all(map(math.isfinite, self.losses)) and all(bool(g.isfinite().all()) for g in found)


@dataclass(kw_only=True, eq=False)
class EvaluationRecord:
    """What a batch of validation, test or prediction computed; tensors are on the CPU.

    Attributes:
        logs: Name -> the numbers that were logged under it, in order.
        output: What the step returned.
        metrics: FQN -> value of the metrics that were updated, for this batch alone.
        draws: Whether the step drew random numbers.
        error: What ended the run, if it failed.
    """

    logs: dict[str, list[float]] = field(default_factory=dict)
    output: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    draws: bool = False
    error: BaseException | None = None
