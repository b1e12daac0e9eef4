"""Metrics of language models that are computed from the loss, without logits."""

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["Perplexity"]


class Perplexity(Metric):
    """Perplexity: exp of the mean negative log-likelihood per token, over all batches and ranks.

    It takes the loss and not the logits, which under tensor parallelism are sharded over the
    vocabulary and would have to be gathered.

    Examples:
        >>> metric = Perplexity()
        >>> metric.update(torch.tensor(0.0), 3)
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    loss_sum: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # A float32 count stops growing at 2^24 tokens.
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("loss_sum", default=zero, dist_reduce_fx="sum")
        self.add_state("count", default=zero.clone(), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: int | Tensor) -> None:
        """Add the loss of a batch.

        Args:
            loss: Scalar: mean loss over the valid tokens, in nats.
            count: Number of valid tokens; with 0 the loss, NaN perhaps, is ignored.
        """
        if int(count):
            self.loss_sum += loss.detach().double() * count
            self.count += count

    def compute(self) -> Tensor:
        """Return the perplexity, a float64 scalar."""
        return torch.exp(self.loss_sum / self.count)
