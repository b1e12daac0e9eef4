"""Faults of gradients that several axes share."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.mutations.fault import Switch
from lightning_par.engine.data import gradient_reduction

__all__ = ["own_norm", "twice"]


def own_norm(switch: Switch) -> None:
    """Clip by the norm of what this rank holds.

    Args:
        switch: Says when.
    """

    def own(healthy: Any) -> Any:
        def norm(parameters: Any, **options: Any) -> Any:
            grads = [
                gradient_reduction._real_part(p.grad) for p in parameters if p.grad is not None
            ]
            total = torch.nn.utils.get_total_norm(grads)
            healthy(parameters, **options)
            return total, torch.zeros_like(total)

        return norm

    switch.swap(gradient_reduction.total_norm, own)


def twice(healthy: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a reduction of gradients that doubles their sums.

    Args:
        healthy: `SharedGradients.reduce`, or that of `ReplicatedGradients`.
    """

    def reduce(self: Any) -> None:
        healthy(self)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    return reduce
