"""The loss of a step whose gradients a pipeline schedule has computed already."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.errors import ConfigurationError

__all__ = ["ScheduledLoss", "loss_of", "put_gradients", "take_gradients"]


class ScheduledLoss(torch.autograd.Function):
    """The loss of a step whose gradients a schedule has computed; backward(g) puts them in place,
    times g.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, install: Callable[[Tensor], None]
    ) -> Tensor:
        """Return the value; `install` puts the gradients in place, times the one it is given."""
        ctx.install = install
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Put the gradients in place."""
        ctx.install(grad)
        return torch.zeros_like(grad), None, None


def loss_of(result: Any) -> Tensor:
    """Return the loss in what `training_step` returned.

    Raises:
        ConfigurationError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = "None" if result is None else f"a {type(result).__name__}"
        if isinstance(result, Mapping):
            kind += f" with the keys {sorted(map(str, result))}"
        if isinstance(loss, Tensor):
            kind += f" whose loss has the shape {tuple(loss.shape)}"
        raise ConfigurationError(
            f"training_step returned {kind}; under a pipeline it has to return "
            "the loss as a "
            "scalar tensor, or a dict with one under 'loss'."
        )
    return loss.reshape(())


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients and leave none."""
    grads = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


@torch.no_grad()
def put_gradients(
    parameters: Sequence[nn.Parameter], computed: list[Tensor | None], factor: Tensor
) -> None:
    """Add the computed gradients times `factor`; without a gradient before, they move without a
    copy.
    """
    scales = factor.device.type != "cpu" or float(factor) != 1  # asking another device would wait
    for index, parameter in enumerate(parameters):
        grad, computed[index] = computed[index], None
        if grad is None:
            continue
        if scales:
            grad.mul_(factor.to(grad.dtype))
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
