"""The pipeline executor: walks through a schedule and runs the user's step for every micro-batch of a stage.

p stages, m micro-batches. The schedule says in which order; the executor posts the receives of an action before it
computes the one before, names the action when something fails, and records when everything ran.
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
        events: When every action computed, in seconds of `time.monotonic`, which all processes of a host share.
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
        self._stage, self._activations, self._gradients = stage, activations, gradients
        self._hooks = hooks
        self.action: Action | None = None

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
            loss_of: Gives the scalar to differentiate from a micro-batch's result; None runs forward only.

        **Communicates**: every activation once to the next stage, every gradient of one once to the previous.
        """
        actions = schedule.actions[self._stage.index]
        run, flying, posted = PipelineRun(), dict[int, _InFlight](), dict[Action, PendingMessage]()
        backwards = [a for a in actions if a.kind is ActionKind.BACKWARD]
        for position, action in enumerate(actions):
            self.action = action
            began = time.monotonic()
            pending = posted.pop(action, None) or self._post(action, flying, signatures)
            if pending is not None:
                pending.wait()
            following = actions[position + 1] if position + 1 < len(actions) else None
            if following is not None and self._can_post(following, flying, signatures):
                posted[following] = self._post(following, flying, signatures)  # type: ignore[assignment]
            start = time.monotonic()
            try:
                if action.kind is ActionKind.FORWARD:
                    self._forward(action.microbatch, pending, step, signatures, loss_of, flying, run)
                else:
                    self._hooks.before_backward(is_last=action is backwards[-1])
                    self._backward(flying.pop(action.microbatch), pending)
            except Exception as error:
                error.add_note(self._where(action))
                raise
            run.events.append(TimedAction(action, start, time.monotonic()))
            run.waited[action] = start - began
        self._activations.drain()
        self._gradients.drain()
        self.action = None
        return run

    def _where(self, action: Action) -> str:
        kind = "forward" if action.kind is ActionKind.FORWARD else "backward"
        return (
            f"in pipeline stage {self._stage.index} of {self._stage.count}, {kind} of micro-batch {action.microbatch}"
        )

    def _can_post(
        self, action: Action, flying: dict[int, _InFlight], signatures: Sequence[Hashable]
    ) -> bool:
        """Whether the action's receive has a known shape and this rank is not the source."""
        if action.kind is ActionKind.FORWARD:
            first = self._stage.is_first
            return not first and self._activations.knows(signatures[action.microbatch])
        return not self._stage.is_last and action.microbatch in flying

    def _post(
        self, action: Action, flying: dict[int, _InFlight], signatures: Sequence[Hashable]
    ) -> PendingMessage | None:
        if action.kind is ActionKind.FORWARD:
            if self._stage.is_first:
                return None
            return self._activations.post_message(signatures[action.microbatch])
        if self._stage.is_last:
            return None
        specs = [TensorSpec.of(t) for t in flying[action.microbatch].sent]
        return self._gradients.post_tensors(specs)

    def _forward(
        self,
        index: int,
        pending: PendingMessage | None,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        loss_of: Callable[[int, Any], Tensor] | None,
        flying: dict[int, _InFlight],
        run: PipelineRun,
    ) -> None:
        stage, flight = self._stage, _InFlight(MicroBatchState())
        if pending is not None:
            tree, flight.received = unpack(pending, with_grad=loss_of is not None)
            flight.state.received = tree

        def forward() -> Any:
            result = stage.run(flight.state, lambda: step(index))
            return result if stage.is_last else stage.outgoing(flight.state)

        result = self._hooks.call(forward)
        if stage.is_last:
            run.results[index] = result
            if loss_of is not None:
                flight.loss = loss_of(index, result)
        else:
            tensors = self._activations.send_message(result, signatures[index])
            flight.sent = [t for t in tensors if t.requires_grad]
        flight.state.recorded.clear()
        if loss_of is not None:
            flying[index] = flight

    def _backward(self, flight: _InFlight, pending: PendingMessage | None) -> None:
        stage = self._stage
        with stage.hold(flight.state, in_backward=True):
            if flight.loss is not None:
                if flight.loss.requires_grad:
                    flight.loss.backward()  # type: ignore[no-untyped-call]
            elif pending is not None and flight.sent:
                torch.autograd.backward(flight.sent, pending.buffers)
        if not stage.is_first:
            leaves = [t for t in flight.received if t.requires_grad]
            grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
            self._gradients.send_tensors(grads)
