"""The Adam step on the host: its rule and the tensors that it changes; `cpu_kernels` computes it.

For the gradient g, its scale s, the bounds +-c and the step number t:

    g <- clamp(s g, -c, c);   L2: g <- g + wd p;   decoupled: p <- p - lr wd p
    m <- m + (1 - b1)(g - m);   v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

**Source**: Kingma and Ba 1412.6980, algorithm 1; Loshchilov and Hutter 1711.05101 (decoupled).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.errors import ConfigurationError

__all__ = ["AdamRule", "AdamTensors", "check_optimizer"]


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Hyperparameters of one step, read from a parameter group when the step was requested.

    Attributes:
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Coefficient of the weight decay.
        decoupled: Whether weight decay bypasses the moments (AdamW), instead of joining the
            gradient (Adam, L2).
        maximize: Whether the step goes along the gradient, not against it.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False

    @classmethod
    def of_group(cls, group: Mapping[str, Any], *, decoupled: bool) -> "AdamRule":
        """Read a parameter group of `torch.optim.Adam` or `AdamW`.

        Args:
            group: The parameter group; its lr and betas may be tensors.
            decoupled: What the optimizer's class does, for groups that do not say.
        """
        first, second = group["betas"]
        # As floats now: a scheduler may change the group before a delayed update reads it.
        return cls(
            lr=float(group["lr"]),
            betas=(float(first), float(second)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            # Newer versions of torch keep it in the group, where AdamW is a kind of Adam.
            decoupled=bool(group.get("decoupled_weight_decay", decoupled)),
            maximize=bool(group["maximize"]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamTensors:
    """Flat tensors of one parameter on the host, n entries each, or the same slice of each.

    Attributes:
        master: Master weight, float32; float64 if all five tensors are.
        mean: First moment, in the dtype of `master` or bfloat16.
        square: Second moment, in the dtype of `mean`.
        grad: Gradient, float32, bfloat16 or float16; float64 if all five tensors are.
        out: Receives the new parameter; may share the memory of `grad`.
        first: Index of the first entry in the whole tensor.
    """

    master: Tensor
    mean: Tensor
    square: Tensor
    grad: Tensor
    out: Tensor
    first: int = 0

    def part(self, low: int, high: int) -> "AdamTensors":
        """Return the slice of entries low .. high - 1."""
        tensors = (self.master, self.mean, self.square, self.grad, self.out)
        master, mean, square, grad, out = (t[low:high] for t in tensors)
        first = self.first + low
        return AdamTensors(master=master, mean=mean, square=square, grad=grad, out=out, first=first)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that the kernels do not compute.

    Raises:
        ConfigurationError: It is not a plain Adam or AdamW.
    """
    kind = type(optimizer)
    # `not in`, no isinstance: a subclass may compute another step.
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            "LP604",
            f"configure_optimizers returned {kind.__module__}.{kind.__name__}, but only "
            "torch.optim.Adam and torch.optim.AdamW can be offloaded. Use one of them, or a "
            "strategy without offloading, such as Hybrid3DStrategy(zero_stage=2).",
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ConfigurationError(
            "LP604",
            f"{kind.__name__} trains complex parameters, which the offloaded Adam step does not "
            "support. Train two real parameters, one for the real and one for the imaginary "
            "part, or use a strategy without offloading, such as Hybrid3DStrategy(zero_stage=2).",
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ConfigurationError(
            "LP604",
            f"{kind.__name__}(amsgrad=True) cannot be offloaded: the offloaded step keeps two "
            "moments of each parameter, but amsgrad needs a third one. Use amsgrad=False, or "
            "a strategy without offloading, such as Hybrid3DStrategy(zero_stage=2).",
        )
