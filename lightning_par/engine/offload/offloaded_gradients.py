"""Norm, scale and clip bound of gradients offloaded to the host."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.data.gradient_reduction import is_counted_here

__all__ = ["OffloadedGradients"]


@dataclass(eq=False)
class OffloadedGradients:
    """Norms of one step's gradients on the host, and what the update does to these gradients.

    They are not scaled or clipped where they are: the kernel applies `factor` and `largest` when it
    reads them, which saves a pass over memory.

    Attributes:
        factor: Multiplies every gradient.
        largest: Largest absolute value after that; entries beyond are clamped.
    """

    factor: Tensor | float = 1.0
    largest: float = math.inf
    _norms: dict[nn.Parameter, tuple[Tensor, bool]] = field(default_factory=dict)
    _peaks: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the gradients, the factor and the bound."""
        self._norms.clear()
        self._peaks.clear()
        self.factor, self.largest = 1.0, math.inf

    @torch.no_grad()
    def record(self, parameter: nn.Parameter, local: Tensor, grad: Tensor) -> None:
        """Compute the norm of a gradient before it is sent.

        Args:
            parameter: The gradient's parameter.
            local: This rank's shard of the gradient.
            grad: The whole gradient; a DTensor tells which ranks hold the same shard.
        """
        dtype = torch.float64 if local.dtype is torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(local, dtype=dtype)
        # The sum of squares may overflow although every entry is finite.
        # Overflow is told by the largest entry.
        self._peaks[parameter] = _peak(local)
        self._norms[parameter] = norm, not isinstance(grad, DTensor) or is_counted_here(grad)

    def norms(self, counts: Callable[[nn.Parameter], bool]) -> list[tuple[Tensor, float]]:
        """Return the norm of every gradient after `factor`, each with a weight of 1 or 0.

        Args:
            counts: Whether this rank counts a parameter; False for a copy that another one counts.
        """
        return [
            (norm * self.factor, float(counts(parameter) and counted))
            for parameter, (norm, counted) in self._norms.items()
        ]

    def unscale(self, inverse: Tensor, found: Tensor) -> None:
        """Divide by the loss scale.

        Args:
            inverse: One over the loss scale.
            found: Set to 1 if an entry of a gradient is not finite.
        """
        # Applied by the kernel: gradients on the host are not touched before it reads them.
        self.factor = self.factor * inverse
        for peak in self._peaks.values():
            found.clamp_(min=(~peak.isfinite()).to(found))

    def clip_by_norm(self, norm: Tensor, largest: float) -> None:
        """Scale the gradients so that the norm of the whole model is at most `largest`."""
        self.factor = self.factor * (largest / (norm + 1e-6)).clamp(max=1.0)

    def nonfinite(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients are not finite."""
        # Called after a step was found bad: here each bool() may synchronize with the device.
        return {p for p, peak in self._peaks.items() if not bool(peak.isfinite())}


def _peak(local: Tensor) -> Tensor:
    """Return the largest absolute value; it is not finite if an entry is not.

    `vector_norm(ord=inf)` does the same, tens of times slower on the CPU, and not for empty shards.
    """
    if not local.numel():
        return local.new_zeros(())
    low, high = torch.aminmax(local)
    return torch.maximum(high, -low)
