"""A traced step that runs its own backwards: nothing is differentiated, and no optimizer steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["run_manually"]

_NOTHING = ("clip_gradients", "toggle_optimizer", "untoggle_optimizer")


class _IdleOptimizer:
    """Stands for an optimizer in the step: it calls closures, and changes nothing.

    Args:
        optimizer: What `configure_optimizers` gave.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        return nullcontext()


def run_manually(model: Any, step: Callable[[], Any]) -> list[Any]:
    """Run a `training_step` in manual optimization; the trace restores the state of the model.

    Gradients are zero after a backward, as a step may take norms of those that are there.

    Args:
        model: The LightningModule.
        step: Calls its step.

    Returns:
        The losses that it would have differentiated.
    """
    losses: list[Any] = []
    configured = model.configure_optimizers()
    idle = [_IdleOptimizer(one) for one in _found(configured, Optimizer)]
    # As they are: they act on the groups of optimizers that are made for the trace alone.
    schedules = [*_found(configured, LRScheduler)] or None

    def manual_backward(loss: Any, *_: Any, **__: Any) -> None:
        # Nothing is differentiated: the trace needs the forward of each loss.
        losses.append(loss)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                like = {"dtype": parameter.dtype, "device": parameter.device}
                parameter.grad = torch.zeros(parameter.shape, **like)  # which reads no value

    own: dict[str, Any] = {name: lambda *_, **__: None for name in _NOTHING}
    own["optimizers"] = lambda *_, **__: _as_lightning(idle)
    own["lr_schedulers"] = lambda: schedules and _as_lightning(schedules)
    own["manual_backward"] = manual_backward
    vars(model).update(own)
    step()
    return losses


def _found(given: Any, kind: type) -> Iterator[Any]:
    """Give what is of a kind in what `configure_optimizers` returned, in its order."""
    if isinstance(given, kind):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _found(one, kind)


def _as_lightning(found: list[Any]) -> Any:
    """Return what `optimizers()` and `lr_schedulers()` give for so many."""
    return found[0] if len(found) == 1 else found
