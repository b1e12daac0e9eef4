"""Running the user's step on some batches, all of it on every stage, and without its logs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.observe.isolate import StateOfParts, untouched
from lightning_par.strategies.components.step_attributes import StepAttributes
from lightning_par.strategies.step.counted_buffers import buffers_of, put_buffers
from lightning_par.strategies.step.pipelined_step import loss_of, StepContext
from lightning_par.strategies.step.returned import returned_numbers
from lightning_par.strategies.step.runner import StepRunner
from lightning_par.strategies.step.step_report import StepReport, StepWatch
from lightning_par.strategies.step.step_traces import LogCall, numbers_of, record_logs

__all__ = ["try_step"]


def try_step(
    steps: StepRunner,
    name: str,
    context: StepContext,
    batches: Sequence[Any],
    rest: Sequence[Any],
    watch: StepWatch,
) -> StepReport:
    """Return what a step does on some batches, each from the same state of the module.

    Args:
        steps: Runs the user's steps.
        name: Of the step.
        context: Precision plugin's context of the step.
        batches: Some samples, and parts of them.
        rest: What else the step takes.
        watch: Watches what else the step does.

    **Communicates**: what the step does.
    """
    module, counts = steps.module, steps.counts
    losses, logs, leaves = list[tuple[float, ...]](), list[list[LogCall]](), tuple[str, ...]()
    state, attributes = StateOfParts(module), StepAttributes(module)
    attributes.begin()
    divides = len(batches) > 1 or steps.mesh.sizes.data == 1
    learns = name == "training_step" and divides and not counts.is_known
    before, ends = buffers_of(module) if learns else {}, list[dict[str, Tensor]]()
    given = [map_tensors(batch, Tensor.clone) for batch in batches] if learns else []

    def run(index: int, followed: AbstractContextManager[Any] | None = None) -> list[LogCall]:
        nonlocal leaves
        calls: list[LogCall] = []
        # A batch that was run already may have been written to.
        batch = map_tensors(given[index], Tensor.clone) if followed is None else batches[index]
        step = partial(steps.call, getattr(module, name), (batch, *rest))
        # Each batch begins from the state of the step, but for what samples change in it: that
        # stays, so that `ends` shows the parts one after the other.
        with state.next_part():
            with (
                context(),
                record_logs(module, calls),
                followed or nullcontext(),
                steps.user_step(("first look",), index),
            ):
                is_training = name == "training_step"
                output = _trained(steps, step, losses) if is_training else steps.evaluated(step)
            calls += returned_numbers(name, output) if name in steps.shown else []
            # Also after an error that `user_step` keeps: what is put back are the shards.
            steps.sharding.release()
            leaves = leaves if index else attributes.names_changed()
            if learns:
                ends.append(buffers_of(module))
        return numbers_of(calls)

    for index in range(len(batches)):
        logs.append(run(index, watch.followed(index)))
    if learns:
        _learn_buffers(steps, before, ends, len(batches) - 1, run)
        # Runs of `again` and `alone` are no parts of the batch.
        del losses[len(batches) :]
    return watch.report(losses=losses, logs=logs, leaves=leaves)


def _learn_buffers(
    steps: StepRunner,
    before: Mapping[str, Tensor],
    ends: list[dict[str, Tensor]],
    last: int,
    run: Callable[[int], Any],
) -> None:
    """Let the step's buffers be told apart, see `CountedBuffers.learn`.

    Args:
        steps: Runs the user's steps.
        before: The buffers before the step.
        ends: Those after it on every batch; `run` adds more.
        last: Number of the last batch.
        run: Runs the step on the batch with a number.
    """
    module = steps.module

    def again() -> list[dict[str, Tensor]]:
        # `run` appends to `ends`; only what these runs have added is given.
        done = len(ends)
        for index in range(1, last + 1):
            run(index)
        return ends[done:]

    def alone() -> dict[str, Tensor]:
        now = buffers_of(module)
        put_buffers(module, {name: value.clone() for name, value in before.items()})
        run(last)
        # As if it had not run: the parts that were run before are still to be compared.
        put_buffers(module, now)
        return ends.pop()

    steps.counts.learn(before, tuple(ends), again, alone)


def _trained(steps: StepRunner, step: Callable[[], Any], losses: list[tuple[float, ...]]) -> Any:
    """Run a step without a trace; return what it gives, and note the losses of its backwards."""
    if not steps.manual.is_used:
        # With a graph, as the step may ask for gradients of its input.
        output = steps.sharding.call(step)
        losses.append((float("nan") if output is None else float(loss_of(output).detach()),))
        return output
    # Each batch from the same weights, which a step may change by hand.
    with untouched(steps.module), steps.manual.looked_at() as found:
        output = steps.sharding.call_with_backwards(step)
    losses.append(tuple(found))
    return output
