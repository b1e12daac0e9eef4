"""A look at a step that no pipeline cuts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_par.engine.data.fsdp import Sharding
from lightning_par.strategies.step.look.loss_rule import Seen
from lightning_par.strategies.step.look.seen_losses import LookAtStep
from lightning_par.strategies.step.look.untouched import StateOfParts, untouched
from lightning_par.strategies.step.manual_step import ManualSteps
from lightning_par.strategies.step.pipelined_step import loss_of, StepContext
from lightning_par.strategies.step.step_traces import LogCall, numbers_of, record_logs

__all__ = ["look_at_whole_step"]


def look_at_whole_step(
    module: pl.LightningModule,
    name: str,
    batches: Sequence[Any],
    rest: Sequence[Any],
    run: Callable[[Sequence[Any]], Any],
    context: StepContext,
    around: Callable[[int], AbstractContextManager[None]],
    sharding: Sharding,
    manual: ManualSteps,
    sight: LookAtStep,
) -> Seen:
    """Run a step on some batches, each from the same state of the module, and say what it did.

    Args:
        module: The user's LightningModule.
        name: Of the step.
        batches: Any number of batches.
        rest: What else the step takes.
        run: Runs the step on its arguments.
        context: Precision plugin's context of the step.
        around: Surrounds the step on the batch with a number.
        sharding: Surrounds every forward.
        manual: Steps that run their own backwards, if they do.
        sight: Sees what the step does besides its loss and logs.

    **Communicates**: what the step does.
    """
    losses, logs, state = [], [], StateOfParts(module)
    for index, batch in enumerate(batches):
        calls: list[LogCall] = []
        step = partial(run, (batch, *rest))
        logging, followed = record_logs(module, calls), sight.followed(index)
        with state.next_part():
            with context(), logging, followed, around(index):
                if name == "training_step":
                    losses.append(_losses_of(step, module, sharding, manual))
                else:
                    sharding.call(step)
            # Also after an error that `around` keeps: what is put back are the shards.
            sharding.release()
        logs.append(numbers_of(calls))
    metrics, seen = sight.metrics.values(), sight.losses.seen
    return Seen(losses=losses, logs=logs, metrics=metrics, calls=seen)


def _losses_of(
    step: Callable[[], Any], module: pl.LightningModule, sharding: Sharding, manual: ManualSteps
) -> tuple[float, ...]:
    """Run a step without a trace; return the losses of its backwards."""
    if not manual.is_used:
        # With a graph, as the step may ask for gradients of its input.
        output = sharding.call(step)
        return (float("nan") if output is None else float(loss_of(output).detach()),)
    # Each batch from the same weights, which a step may change by hand.
    with untouched(module), manual.looked_at() as losses:
        sharding.call_with_backwards(step)
    return tuple(losses)
