"""A step of the mesh that leaves no trace: forward and backward without dropout."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_par.engine.rng import restore_random_states
from lightning_par.observe.isolate import isolated
from lightning_par.observe.modes import WithoutDropout
from lightning_par.strategies.proof.silence import silent
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.pipelined_step import loss_of
from lightning_par.strategies.step.step_traces import logs_off

__all__ = ["rehearsed"]


@contextmanager
def rehearsed(
    model: ParallelModel,
    plugin: Precision,
    args: Sequence[Any],
    random_states: dict[str, Any],
    device: torch.device,
) -> Iterator[Tensor]:
    """Run a step without dropout, without logs and without the user's hooks; gives its weighted
    loss while its gradients are in place, and afterwards everything is as before.

    Args:
        model: The model on the mesh.
        plugin: Precision plugin, whose context surrounds the step.
        args: The batch, and what else `training_step` takes.
        random_states: Of the generators, at the start of the step.
        device: That of this rank.

    **Communicates**: as a training step does.
    """
    module = model.module
    quiet = logs_off(module), silent(module.trainer.loggers)
    with isolated(module), quiet[0], quiet[1]:
        restore_random_states(random_states, device)
        with WithoutDropout():
            output, step = model.steps.training(plugin, args)
            with closing(step):
                weighted = step.weigh(loss_of(output))
                model.steps.before_backward()
                with model.steps.backward(step):
                    weighted.backward()
        model.gradients.after_backward()
        yield weighted.detach()
