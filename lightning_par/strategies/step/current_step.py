"""What a training step leaves for its backward."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from lightning_par.strategies.step.batch_weights import weigh

__all__ = ["Step"]


@dataclass(kw_only=True, eq=False)
class Step:
    """What the forward of one training step found out for its backward.

    `StepRunner.training` makes it, the backward consumes it and closes it. Under a pipeline it only
    says whether labels are valid; gradients and loss scale are with the loss (`ScheduledLoss`).

    Attributes:
        loss_scale: Factor of the loss before its backward; None: 1.
        has_valid_labels: Bool tensor, whether any entry of the batch counts; None: every entry
            counts.
        is_zero_weight: Whether the loss has weight 0; see Note [Zero-weight loss] in
            `engine/data/zero_weight_loss.py`.
        opened: What has to stay open until the backward is over, as recomputation needs it.
        skips: Whether the user's step gave no loss, so that there is no backward.
    """

    loss_scale: Tensor | None = None
    has_valid_labels: Tensor | None = None
    is_zero_weight: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    skips: bool = False

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss times its scale."""
        return loss if self.loss_scale is None else weigh(loss, self.loss_scale.to(loss.dtype))

    def close(self) -> None:
        """Close what the forward opened; may be called again."""
        self.opened.close()
