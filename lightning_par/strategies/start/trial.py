"""Running the user's step on some batches, without a pipeline and without its logs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_par.engine.data.fsdp import Sharding
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.isolate import StateOfParts, untouched
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.components.step_attributes import StepAttributes
from lightning_par.strategies.start.counted_buffers import buffers_of, CountedBuffers
from lightning_par.strategies.start.seen_losses import LookAtStep
from lightning_par.strategies.step.loss_rule import Seen
from lightning_par.strategies.step.manual_step import ManualSteps
from lightning_par.strategies.step.pipelined_step import loss_of, StepContext
from lightning_par.strategies.step.step_traces import (
    LogCall,
    numbers_of,
    record_logs,
)

__all__ = ["Trial"]


class Trial:
    """Runs the user's step on batches of its own, each from the same state of the module.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        layout: What is declared of its batches.
        sharding: Surrounds every forward and backward.
        manual: Steps that run their own backwards, if they do.
        user_step: Surrounds the step on the batch of a number.
        run: Calls the step with its arguments.

    Attributes:
        counts: Buffers that replicas add to.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        layout: BatchLayout,
        sharding: Sharding,
        manual: ManualSteps,
        user_step: Callable[[int], AbstractContextManager[None]],
        run: Callable[[Callable[..., Any], Sequence[Any]], Any],
    ) -> None:
        self._module, self._sharding, self._manual = module, sharding, manual
        self._user_step, self._run = user_step, run
        self.counts = CountedBuffers(module, mesh, takes_parts=layout.local_statistics)
        self._divides = mesh.sizes.data > 1

    def run(
        self,
        name: str,
        context: StepContext,
        batches: Sequence[Any],
        rest: Sequence[Any],
        sight: LookAtStep,
    ) -> Seen:
        """Return what a step does.

        Args:
            name: Of the step.
            context: Precision plugin's context of the step.
            batches: Some samples, and parts of them.
            rest: What else the step takes.
            sight: Sees what else the step does.

        **Communicates**: what the step does.
        """
        losses, logs, leaves = [], [], tuple[str, ...]()
        state, attributes = StateOfParts(self._module), StepAttributes(self._module)
        attributes.begin()
        divides = len(batches) > 1 or not self._divides
        learns = name == "training_step" and divides and not self.counts.is_known
        before, ends = buffers_of(self._module) if learns else {}, list[dict[str, Tensor]]()
        for index, batch in enumerate(batches):
            calls: list[LogCall] = []
            step = partial(self._run, getattr(self._module, name), (batch, *rest))
            logging, followed = record_logs(self._module, calls), sight.followed(index)
            with state.next_part():
                with context(), logging, followed, self._user_step(index):
                    if name == "training_step":
                        losses.append(self._losses_of(step))
                    else:
                        self._sharding.call(step)
                # Also after an error that `user_step` keeps: what is put back are the shards.
                self._sharding.release()
                leaves = leaves if index else attributes.names_changed()
                if learns:
                    ends.append(buffers_of(self._module))
            logs.append(numbers_of(calls))
        if learns:
            self.counts.learn(before, ends)
        metrics, seen = sight.metrics.values(), sight.losses.seen
        return Seen(losses=losses, logs=logs, metrics=metrics, calls=seen, leaves=leaves)

    def _losses_of(self, step: Callable[[], Any]) -> tuple[float, ...]:
        """Run a step without a trace; return the losses of its backwards."""
        if not self._manual.is_used:
            # With a graph, as the step may ask for gradients of its input.
            output = self._sharding.call(step)
            return (float("nan") if output is None else float(loss_of(output).detach()),)
        # Each batch from the same weights, which a step may change by hand.
        with untouched(self._module), self._manual.looked_at() as losses:
            self._sharding.call_with_backwards(step)
        return tuple(losses)
