"""A step of the mesh that leaves no trace: forward and backward without dropout."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TYPE_CHECKING

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn, Tensor

from lightning_par.engine.rng import fork_all_rng, restore_random_states
from lightning_par.strategies.proof.determinism import WithoutDropout
from lightning_par.strategies.step.logs import logs_off
from lightning_par.strategies.step.pipelined_step import loss_of

if TYPE_CHECKING:
    from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = ["rehearsed"]


@contextmanager
def rehearsed(
    model: "ParallelModel",
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
    with fork_all_rng(device), _unchanged(module), logs_off(module):
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


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put back, at the end, gradients, buffers and plain attributes of all modules."""
    grads = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    held = [(owner, _copied(vars(owner))) for owner in module.modules()]
    try:
        yield
    finally:
        for owner, (attributes, contents) in held:
            for name in vars(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)
            for container, copied in contents:
                _refill(container, copied)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad


def _copied(attributes: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Return the attributes of an object, and contents of those that can be changed in place."""
    contents: list[tuple[Any, Any]] = []
    for name, value in attributes.items():
        if name in ("_parameters", "_modules") or name.endswith("_hooks"):
            continue  # FSDP changes these during a step, and back again
        if type(value) in (list, dict, set):
            contents.append((value, value.copy()))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            contents.append((value, value.detach().clone()))
    return dict(attributes), contents


def _refill(container: Any, copied: Any) -> None:
    if isinstance(container, Tensor):
        with torch.no_grad():
            container.copy_(copied)
    elif isinstance(container, list):
        container[:] = copied
    else:
        container.clear()
        container.update(copied)
