"""A traced step that runs its own backwards: nothing is differentiated, and no optimizer steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["run_manually"]

_NOTHING = ("clip_gradients", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer")


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
    idle = [_IdleOptimizer(one) for one in _configured(model.configure_optimizers())]

    def manual_backward(loss: Any, *_: Any, **__: Any) -> None:
        # Nothing is differentiated: the trace needs the forward of each loss.
        losses.append(loss)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                like = {"dtype": parameter.dtype, "device": parameter.device}
                parameter.grad = torch.zeros(parameter.shape, **like)  # which reads no value

    own: dict[str, Any] = {name: lambda *_, **__: None for name in _NOTHING}
    own["optimizers"] = lambda *_, **__: idle[0] if len(idle) == 1 else idle
    own["manual_backward"] = manual_backward
    vars(model).update(own)
    step()
    return losses


def _configured(given: Any) -> Iterator[Optimizer]:
    """Give the optimizers in what `configure_optimizers` returned, in its order."""
    if isinstance(given, Optimizer):
        yield given
    elif isinstance(given, Mapping):
        yield given["optimizer"]
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list):
        yield from _configured(given[0])  # and a list of schedules
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _configured(one)
