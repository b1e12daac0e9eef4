"""The pipeline executor: runs the actions of one rank in the order of a schedule.

A forward is one call of the user's step for one micro-batch, up to the end of the stage. The
executor posts the receives of an action before it computes the action before it, names the action
in errors, and records when every action ran.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.activity import Activity
from lightning_par.engine.clock import Clock, HostClock
from lightning_par.engine.pipeline.actions import Action, ActionKind, Schedule, TimedAction
from lightning_par.engine.pipeline.p2p import NOTHING, PendingMessage
from lightning_par.engine.pipeline.split_backward import Deferred, WeightGradients
from lightning_par.engine.pipeline.stage import MicroBatchState, Stage
from lightning_par.engine.pipeline.stage_links import StageLink
from lightning_par.errors import PipelineError

__all__ = ["PipelineExecutor", "PipelineHooks", "PipelineRun", "TrainedParts"]


@runtime_checkable
class PipelineHooks(Protocol):
    """Callbacks around forwards and backwards; data parallelism is one (`Sharding`)."""

    def call(self, step: Callable[[], Any]) -> Any:
        """Run one forward, `step()`, inside whatever has to surround it."""

    def before_backward(self, *, is_last: bool, is_whole: bool) -> None:
        """Prepare one backward.

        Args:
            is_last: Whether all gradients are complete after it.
            is_whole: Whether it computes weights' gradients; otherwise `finish` follows.
        """

    def without_backward(self) -> None:
        """End a backward that was prepared and has nothing to compute."""

    def finish(self) -> None:
        """Reduce the gradients that are complete only after the last action."""


@dataclass(eq=False)
class PipelineRun:
    """Results and times of one run of a schedule on this rank.

    Attributes:
        results: On the last stage, what the step returned for every micro-batch; elsewhere empty.
        clock: The clock that took the marks.
        marks: Action, then three marks: its turn, its inputs have arrived, it is done.
        peak_in_flight: The most micro-batches whose activations each stage held at once.
    """

    results: dict[int, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=HostClock)
    marks: list[tuple[Action, Any, Any, Any]] = field(default_factory=list)
    peak_in_flight: dict[int, int] = field(default_factory=dict)

    @cached_property
    def _times(self) -> list[list[float]]:
        times = self.clock.read([mark for _, *marks in self.marks for mark in marks])
        # Three marks for each action: its turn, its inputs are there, it is done.
        return [times[i : i + 3] for i in range(0, len(times), 3)]

    @property
    def events(self) -> list[TimedAction]:
        """When every action computed, in seconds of `time.monotonic`, which all processes of a host
        share; to be read after the run.
        """
        pairs = zip(self.marks, self._times, strict=True)
        return [TimedAction(action, start, end) for (action, *_), (_, start, end) in pairs]

    @property
    def waited(self) -> dict[Action, float]:
        """Seconds spent waiting for other stages, per action; to be read after the run."""
        pairs = zip(self.marks, self._times, strict=True)
        return {action: start - turn for (action, *_), (turn, start, _) in pairs}


_NAMES: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.BACKWARD_INPUT: "input's backward",
        ActionKind.BACKWARD_WEIGHT: "weights' backward",
    }
)


@dataclass(eq=False)
class _InFlight:
    """A micro-batch between its forward and its backward on one stage."""

    state: MicroBatchState = field(default_factory=MicroBatchState)
    received: list[Tensor] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    waiting: list[Deferred] = field(default_factory=list)


class PipelineExecutor:
    """Runs the stages of one rank of a pipeline.

    Args:
        stages: The stages of this rank, from `cut_stages`.
        links: s -> the link between stages s and s + 1, from `connect`.
        hooks: Callbacks around forward and backward; None: nothing surrounds them.
        gradients: Holds weights' gradients until their action, if the schedule splits the backward.
        activity: Record of what this rank is doing, written before every action.

    Attributes:
        clock: Clock that times the actions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Mapping[int, StageLink],
        hooks: PipelineHooks | None = None,
        gradients: WeightGradients | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.stages, self.links, self.hooks = tuple(stages), links, hooks
        self.gradients = gradients or WeightGradients()
        self.activity = activity or Activity()
        self.clock: Clock = HostClock()

    def run(
        self,
        schedule: Schedule,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        scaled_loss_of: Callable[[int, Any], Tensor] | None,
        around: Callable[[int], AbstractContextManager[bool]] = lambda _: nullcontext(True),
        replay: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        has_failed: Callable[[PipelineError], bool] = lambda _: False,
    ) -> PipelineRun:
        """Run every action of this rank.

        Args:
            schedule: The same on every rank; it places the stages where they are.
            step: Runs the user's step for a micro-batch; unwound early on all but the last stage.
            signatures: For every micro-batch, a value that determines the shapes of its messages.
            scaled_loss_of: Returns the scalar to differentiate (the loss, weighted and scaled) from
                a micro-batch's result; None runs forward only.
            around: Context around the backward of a micro-batch's loss; its value says whether the
                gradients count, and the previous stage gets 0 for those that do not.
            replay: Context around every backward of a micro-batch, which may recompute blocks.
            has_failed: Whether an error of the user's step, or this one, was noted, to be raised on
                all ranks after the run: a stage that then has no result says so to the next one,
                which waits for it. Without a backward only.

        **Communicates**: every activation once to the next stage, every gradient of one once to the
        previous.
        """
        walk = _Walk(self, step, signatures, scaled_loss_of, around, replay, has_failed)
        walk.go(schedule.actions[schedule.rank_of_stage[self.stages[0].index]])
        # Sends are asynchronous: a rank that went on would free what has not left yet.
        self.activity.begin("end of the pipeline's schedule")
        for link in self.links.values():
            link.activations.drain()
            link.gradients.drain()
        return walk.run


class _Walk:
    """The state of one run of one rank's actions."""

    def __init__(
        self,
        executor: PipelineExecutor,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        scaled_loss_of: Callable[[int, Any], Tensor] | None,
        around: Callable[[int], AbstractContextManager[bool]],
        replay: Callable[[int], AbstractContextManager[None]],
        has_failed: Callable[[PipelineError], bool],
    ) -> None:
        self.stages = {stage.index: stage for stage in executor.stages}
        self.links, self.hooks = executor.links, executor.hooks
        self.gradients, self.activity = executor.gradients, executor.activity
        self.step, self.signatures, self.scaled_loss_of = step, signatures, scaled_loss_of
        self.around, self.replay, self.has_failed = around, replay, has_failed
        self.run = PipelineRun(clock=executor.clock)
        self.flying: dict[tuple[int, int], _InFlight] = {}

    def go(self, actions: Sequence[Action]) -> None:
        """Run the actions in order; a receive is posted before the action ahead of it computes."""
        # If weights' gradients come later, FSDP may reduce none before `finish`.
        splits = any(a.kind is ActionKind.BACKWARD_WEIGHT for a in actions)
        # Of all stages of the rank: FSDP reduces what accumulates once, in the last of them.
        last = [a for a in actions if a.kind is ActionKind.BACKWARD][-1:]
        posted: PendingMessage | None = None
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            turn = self.run.clock.mark()
            self.activity.begin(_NAMES[action.kind], action.microbatch, action.stage)
            try:
                pending = posted or self._post(action)
                if pending is not None:
                    pending.wait()
                # After the wait for this action's inputs, and before it computes: so the message
                # of the next action travels during the computation.
                posted = self._post_early(following)
                start = self.run.clock.mark()
                self._compute(action, pending, is_last=action in last, splits=splits)
            except Exception as error:
                error.add_note(f"in pipeline {self._describe(action)}")
                raise
            self.run.marks.append((action, turn, start, self.run.clock.mark()))
        # Gradients of weights came by W actions, of which FSDP's hooks know nothing.
        if splits and self.hooks is not None:
            self.hooks.finish()

    def _describe(self, action: Action) -> str:
        count = next(iter(self.stages.values())).count
        return (
            f"stage {action.stage} of {count}, {_NAMES[action.kind]} of micro-batch "
            f"{action.microbatch}"
        )

    def _compute(
        self, action: Action, pending: PendingMessage | None, *, is_last: bool, splits: bool
    ) -> None:
        key = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD:
            self._forward(action, pending)
            return
        flight = self.flying[key]
        if action.kind is not ActionKind.BACKWARD_WEIGHT:
            if self.hooks is not None:
                self.hooks.before_backward(is_last=is_last and not splits, is_whole=not splits)
            self._backward(action, flight, pending)
        if action.kind.ends_microbatch:
            for deferred in flight.waiting:
                # W adds to `.grad` by a backward of its own, from the weight alone.
                deferred.accumulate()
            del self.flying[key]

    def _post_early(self, action: Action | None) -> PendingMessage | None:
        """Post the receive of the next action, if its shapes are known already."""
        if action is None:
            return None
        if action.kind is ActionKind.FORWARD:
            before = self.links.get(action.stage - 1)
            # The first message of a shape brings its header, which has to be waited for: posted
            # early, it would stop this rank before it has sent what the other one needs.
            signature = self.signatures[action.microbatch]
            known = before is not None and before.activations.knows(signature)
            return self._post(action) if known else None
        behind = self.links.get(action.stage)
        # The queue of a local link holds nothing before this rank has sent it.
        if behind is None or behind.gradients.is_local:
            return None
        # Gradients arrive in the shapes of what was sent, which is known after the forward.
        return self._post(action) if (action.stage, action.microbatch) in self.flying else None

    def _post(self, action: Action) -> PendingMessage | None:
        """Post the receive of an action, if it has one."""
        if action.kind is ActionKind.FORWARD:
            before = self.links.get(action.stage - 1)
            if before is None:
                return None
            return before.activations.post_message(self.signatures[action.microbatch])
        behind = self.links.get(action.stage)
        if behind is None or not action.kind.gives_input_gradient:
            return None
        return behind.gradients.post_gradients(self.flying[action.stage, action.microbatch].sent)

    def _forward(self, action: Action, pending: PendingMessage | None) -> None:
        stage, index, flight = self.stages[action.stage], action.microbatch, _InFlight()
        trains = self.scaled_loss_of is not None
        failed = pending is not None and pending.header == NOTHING
        if pending is not None and not failed:
            flight.state.received, flight.received = pending.unpack(with_grad=trains)

        # On all but the last stage the step is unwound by StageExit, and has no result.
        def forward() -> Any:
            result = stage.run(flight.state, lambda: self.step(index))
            return result if stage.is_last else stage.outgoing(flight.state)

        # A stage that has failed in a look goes on with the schedule: the others wait for its
        # messages.
        try:
            if not failed:
                result = forward() if self.hooks is None else self.hooks.call(forward)
        except PipelineError as error:
            failed = self.has_failed(error)
            if not failed:
                raise
        if failed:
            if not stage.is_last:
                self.links[stage.index].activations.send_nothing(self.signatures[index])
            return
        if stage.is_last:
            self.run.results[index] = result
            if self.scaled_loss_of is not None:
                flight.loss = self.scaled_loss_of(index, result)
        else:
            channel = self.links[stage.index].activations
            tensors = channel.send_message(result, self.signatures[index])
            # Tensors that need no gradient get none from the next stage.
            flight.sent = [t for t in tensors if t.requires_grad]
        # Sent, and kept alive by autograd where the backward needs it.
        flight.state.recorded.clear()
        peaks, held = self.run.peak_in_flight, 1 + sum(s == stage.index for s, _ in self.flying)
        peaks[stage.index] = max(peaks.get(stage.index, 0), held)
        if trains:
            self.flying[stage.index, index] = flight

    def _backward(self, action: Action, flight: _InFlight, pending: PendingMessage | None) -> None:
        """Compute the gradients of what was received, and of the weights that do not wait."""
        stage, counts = self.stages[action.stage], True
        # The W action of this micro-batch takes what is collected here. A whole backward computes
        # all at once: FSDP may reduce at its end.
        waits = self.gradients.is_used and action.kind is ActionKind.BACKWARD_INPUT
        collects = self.gradients.collect(flight.waiting) if waits else nullcontext()
        # Recomputation runs blocks again: the stage has to answer as in the forward.
        held = stage.hold(flight.state, in_backward=True)
        with held, collects, self.replay(action.microbatch):
            if flight.loss is not None:
                with self.around(action.microbatch) as counts:
                    self._differentiate([flight.loss], [None])
            elif pending is not None and flight.sent:
                grads = pending.gradients()
                # Autograd refuses None for a tensor that it is to start from.
                found = [n for n, grad in enumerate(grads) if grad is not None]
                self._differentiate([flight.sent[n] for n in found], [grads[n] for n in found])
        if not stage.is_first:
            leaves = [t for t in flight.received if t.requires_grad]
            # Zeros and not nothing: the previous stage has posted a receive for each of them.
            grads = [t.grad if counts else torch.zeros_like(t) for t in leaves]
            self.links[stage.index - 1].gradients.send_gradients(grads, leaves)
        if not counts:
            flight.waiting = [deferred.zeroed() for deferred in flight.waiting]
        # Frees the activations; a W action still to come holds its own (x, dy).
        flight.state, flight.received, flight.sent = MicroBatchState(), [], []
        flight.loss = None

    def _differentiate(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Compute gradients, if any of the tensors has a graph."""
        # FSDP2 reduces in the backward: where none runs, its collectives are called for all the
        # same, as other replicas are in theirs.
        if any(tensor.requires_grad for tensor in tensors):
            torch.autograd.backward(tensors, grads)
        elif self.hooks is not None:
            self.hooks.without_backward()


class TrainedParts:
    """Counts how often parameters were frozen or unfrozen on any stage.

    Whether an output of a stage needs a gradient depends on all parameters before it, and stages
    agree on their messages once for each signature. So the signature holds this count. Stages ask
    each other at the start of an epoch, where callbacks freeze and unfreeze. A change within an
    epoch is refused (LP405): a stage cannot see that another one has changed.

    Args:
        module: Holds the stages of this rank.
        device: Device of this rank.
        group: The ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
        self._module, self._device, self._group = module, device, group
        self._count, self._epoch = 0, -1
        self._trains: list[bool] | None = None

    def count(self, epoch: int) -> int:
        """Return the count, the same on all stages.

        **Communicates**: in the first step of an epoch one all-reduce of a number over the ``pp``
        axis.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            trains = [p.requires_grad for p in self._module.parameters()]
            vote = torch.tensor(trains != self._trains, device=self._device, dtype=torch.int)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
            self._count, self._trains = self._count + int(vote), trains
        return self._count
