"""The pipeline executor: walks through a schedule and runs the user's step for every micro-batch of
a stage.

p stages, m micro-batches. The schedule says in which order; the executor posts the receives of an
action before it computes the one before, names the action when something fails, and records when
everything ran.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_par.engine.schedule import Action, ActionKind, Schedule, TimedAction
from lightning_par.engine.stages import MicroBatchState, Stage
from lightning_par.engine.transport import Channel, PendingMessage, TensorSpec, unpack

__all__ = ["PipelineExecutor", "PipelineHooks", "PipelineRun"]


class PipelineHooks(Protocol):
    """What the executor asks of its caller."""

    def call(self, step: Callable[[], Any]) -> Any:
        """Run one forward; the place for whatever has to surround it."""

    def before_backward(self, *, is_last: bool) -> None:
        """Get ready for one backward; `is_last` for the last one of the schedule."""


@dataclass(eq=False)
class PipelineRun:
    """What one walk through a schedule gave on this rank.

    Attributes:
        results: On the last stage, what the step returned for every micro-batch; elsewhere empty.
        events: When every action computed, in seconds of `time.monotonic`, which all processes of a
            host share.
        waited: Seconds spent waiting for other stages, per action.
    """

    results: dict[int, Any] = field(default_factory=dict)
    events: list[TimedAction] = field(default_factory=list)
    waited: dict[Action, float] = field(default_factory=dict)


@dataclass(eq=False)
class _InFlight:
    state: MicroBatchState
    received: list[Tensor] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class PipelineExecutor:
    """Runs one stage of a pipeline.

    Args:
        stage: From `cut_stage`.
        activations: Receives from the previous stage, sends to the next.
        gradients: Receives from the next stage, sends to the previous.
        hooks: Calls around forward and backward.
    """

    def __init__(
        self, stage: Stage, activations: Channel, gradients: Channel, hooks: PipelineHooks
    ) -> None:
        self.stage, self.activations, self.gradients = stage, activations, gradients
        self.hooks = hooks

    def run(
        self,
        schedule: Schedule,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        loss_of: Callable[[int, Any], Tensor] | None,
    ) -> PipelineRun:
        """Run every action of this stage.

        Args:
            schedule: One stage per rank; the same on every rank.
            step: Runs the user's step for a micro-batch; unwound early on all but the last stage.
            signatures: For every micro-batch, a value that tells the shapes of its messages.
            loss_of: Gives the scalar to differentiate from a micro-batch's result; None runs
                forward only.

        **Communicates**: every activation once to the next stage, every gradient of one once to the
        previous.
        """
        walk = _Walk(self, step, signatures, loss_of)
        walk.go(schedule.actions[self.stage.index])
        self.activations.drain()
        self.gradients.drain()
        return walk.run


class _Walk:
    """One walk of one stage through a schedule."""

    def __init__(
        self,
        executor: PipelineExecutor,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        loss_of: Callable[[int, Any], Tensor] | None,
    ) -> None:
        self.stage, self.hooks = executor.stage, executor.hooks
        self.activations, self.gradients = executor.activations, executor.gradients
        self.step, self.signatures, self.loss_of = step, signatures, loss_of
        self.run = PipelineRun()
        self.flying: dict[int, _InFlight] = {}

    def go(self, actions: Sequence[Action]) -> None:
        """Run the actions in order; a receive is posted before the action ahead of it computes."""
        last = [a for a in actions if a.kind is ActionKind.BACKWARD][-1:]
        posted: PendingMessage | None = None
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            began = time.monotonic()
            try:
                pending = posted or self._post(action)
                if pending is not None:
                    pending.wait()
                posted = self._post_early(following)
                start = time.monotonic()
                if action.kind is ActionKind.FORWARD:
                    self._forward(action.microbatch, pending)
                else:
                    self.hooks.before_backward(is_last=action in last)
                    self._backward(self.flying.pop(action.microbatch), pending)
            except Exception as error:
                kind = "forward" if action.kind is ActionKind.FORWARD else "backward"
                error.add_note(
                    f"in pipeline stage {self.stage.index} of {self.stage.count}, {kind} of "
                    f"micro-batch {action.microbatch}"
                )
                raise
            self.run.events.append(TimedAction(action, start, time.monotonic()))
            self.run.waited[action] = start - began

    def _post_early(self, action: Action | None) -> PendingMessage | None:
        """Post a receive whose shapes are known already; otherwise it is posted when it is due."""
        if action is None:
            return None
        if action.kind is ActionKind.FORWARD:
            known = self.activations.knows(self.signatures[action.microbatch])
            return self._post(action) if known else None
        return self._post(action) if action.microbatch in self.flying else None

    def _post(self, action: Action) -> PendingMessage | None:
        """Post the receive of an action, if it has one."""
        if action.kind is ActionKind.FORWARD:
            if self.stage.is_first:
                return None
            return self.activations.post_message(self.signatures[action.microbatch])
        if self.stage.is_last:
            return None
        specs = [TensorSpec.of(t) for t in self.flying[action.microbatch].sent]
        return self.gradients.post_tensors(specs)

    def _forward(self, index: int, pending: PendingMessage | None) -> None:
        stage, flight = self.stage, _InFlight(MicroBatchState())
        trains = self.loss_of is not None
        if pending is not None:
            flight.state.received, flight.received = unpack(pending, with_grad=trains)

        def forward() -> Any:
            result = stage.run(flight.state, lambda: self.step(index))
            return result if stage.is_last else stage.outgoing(flight.state)

        result = self.hooks.call(forward)
        if stage.is_last:
            self.run.results[index] = result
            if self.loss_of is not None:
                flight.loss = self.loss_of(index, result)
        else:
            tensors = self.activations.send_message(result, self.signatures[index])
            flight.sent = [t for t in tensors if t.requires_grad]
        flight.state.recorded.clear()
        if trains:
            self.flying[index] = flight

    def _backward(self, flight: _InFlight, pending: PendingMessage | None) -> None:
        stage = self.stage
        with stage.hold(flight.state, in_backward=True):
            if flight.loss is not None:
                if flight.loss.requires_grad:
                    flight.loss.backward()
            elif pending is not None and flight.sent:
                torch.autograd.backward(flight.sent, pending.buffers)
        if not stage.is_first:
            leaves = [t for t in flight.received if t.requires_grad]
            grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
            self.gradients.send_tensors(grads)
