"""What has to be known of gradients that are no longer on the device: norms, factors, bounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.data.gradient_norm import is_counted_here

__all__ = ["OffloadedGradients"]


@dataclass(eq=False)
class OffloadedGradients:
    """The gradients of one step that left for the host, and what the update has to do to them.

    Attributes:
        factor: By which they are multiplied in the update.
        largest: Bound of their entries after that.
    """

    factor: Tensor | float = 1.0
    largest: float = math.inf
    _norms: dict[nn.Parameter, tuple[Tensor, bool]] = field(default_factory=dict)
    _peaks: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything."""
        self._norms.clear()
        self._peaks.clear()
        self.factor, self.largest = 1.0, math.inf

    @torch.no_grad()
    def note(self, parameter: nn.Parameter, local: Tensor, grad: Tensor) -> None:
        """Take the norm of a gradient that leaves.

        Args:
            parameter: Whose it is.
            local: This rank's part, on the device where norms meet.
            grad: The gradient; a DTensor says which ranks hold the same part.
        """
        dtype = torch.float64 if local.dtype is torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(local, dtype=dtype)
        # The sum of squares may overflow although every entry is finite.
        self._peaks[parameter] = _peak(local)
        self._norms[parameter] = norm, not isinstance(grad, DTensor) or is_counted_here(grad)

    def norms(self, counts: Callable[[nn.Parameter], bool]) -> list[tuple[Tensor, float]]:
        """Return the norm of every gradient after `factor`, and 1, or 0 for a copy.

        Args:
            counts: False for a copy that another rank counts.
        """
        return [
            (norm * self.factor, float(counts(parameter) and counted))
            for parameter, (norm, counted) in self._norms.items()
        ]

    def unscale(self, inverse: Tensor, found: Tensor) -> None:
        """Divide by the scale of the loss.

        Args:
            inverse: Of the scale.
            found: Set to 1 if an entry is not finite.
        """
        self.factor = self.factor * inverse
        for peak in self._peaks.values():
            found.clamp_(min=(~peak.isfinite()).to(found))

    def clip_by_norm(self, norm: Tensor, largest: float) -> None:
        """Scale so that the norm of the whole model is at most `largest`."""
        self.factor = self.factor * (largest / (norm + 1e-6)).clamp(max=1.0)

    def nonfinite(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients are not finite."""
        return {p for p, peak in self._peaks.items() if not bool(peak.isfinite())}


def _peak(local: Tensor) -> Tensor:
    """Return a number that is finite if all entries are; their largest absolute value.

    A norm would say the same, tens of times slower on the CPU, and not of an empty shard.
    """
    if not local.numel():
        return local.new_zeros(())
    low, high = torch.aminmax(local)
    return torch.maximum(high, -low)
