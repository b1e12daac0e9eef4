"""What a micro-batch, a replica and a context rank weigh in the mean loss of the global batch.

Note [Weight 0]: the mean over no valid entry is NaN, and so is NaN times 0. What weighs nothing is
therefore left out, whatever its value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import batch_size, count_valid
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = ["BatchWeigher", "BatchWeights", "weigh", "weighted_mean"]


def weigh(value: Tensor, weight: Tensor) -> Tensor:
    """Return value times weight, entry by entry; 0 where the weight is 0, see Note [Weight 0]."""
    return torch.where(weight > 0, value, 0) * weight


def weighted_mean(
    values: Tensor, weights: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and the total weight; the mean of nothing is NaN.

    Args:
        values: Numbers of this rank; NaN where they weigh 0 does not matter.
        weights: Weights of the same shape, on the same device.
        group: Ranks whose values are averaged together; None: this rank alone.

    **Communicates**: one all-reduce of two numbers over `group`.
    """
    sums = torch.stack([weigh(values, weights).sum(), weights.sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[0] / sums[1], sums[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchWeights:
    """What this replica's micro-batches weigh in the global batch.

    Attributes:
        scales: For every micro-batch, ranks * (its valid entries) / (those of the global batch),
            where the ranks are those that see other tokens; the gradient of a mean over them of
            losses times these is that of the global mean.
        total: Weight of this replica, 1 on average over the replicas.
        samples: Samples in the global batch, or None if nobody counted.
        zero: Numbers of this replica's micro-batches whose loss has weight 0.
        context_group: Ranks that see other tokens of the same samples; None: this one sees all.
    """

    scales: tuple[Tensor, ...]
    total: Tensor
    samples: Tensor | None
    zero: frozenset[int] = frozenset()
    context_group: dist.ProcessGroup | None = None

    @property
    def own(self) -> Tensor:
        """Weight of this rank, 1 on average over those that see other tokens."""
        return torch.stack(self.scales).sum()

    @classmethod
    def by_samples(cls, microbatches: Sequence[Any]) -> "BatchWeights":
        """Weigh micro-batches by their samples, without asking other replicas."""
        counts = torch.tensor([float(batch_size(part)) for part in microbatches])
        return cls(scales=tuple(counts.unbind()), total=counts.sum(), samples=None)


class BatchWeigher:
    """Weighs micro-batches by their valid entries: labels that count or, without labels, samples.

    Args:
        mesh: Its replicas and context ranks see other tokens.
        batch_layout: Says where the labels are.
    """

    def __init__(self, mesh: ParallelMesh, batch_layout: BatchLayout) -> None:
        sizes = mesh.sizes
        self._batch_layout = batch_layout
        self._ranks, self._replicas = sizes.shares, sizes.data
        self._data_group = mesh.data_group
        self._context_group = mesh.group("cp") if sizes.context > 1 else None

    @property
    def is_needed(self) -> bool:
        """Whether several ranks see other tokens, so that a mean over ranks needs weights."""
        return self._ranks > 1

    def has_valid_labels(self, batch: Any) -> Tensor | None:
        """Return whether any label of a batch counts; None if there are no labels."""
        if self._batch_layout.labels is None:
            return None
        return count_valid(batch, self._batch_layout) > 0

    def weigh(self, microbatches: Sequence[Any]) -> BatchWeights:
        """Return the weights of this replica's micro-batches.

        Args:
            microbatches: This rank's tokens of them, in order.

        **Communicates**: one all-reduce of one number per micro-batch over the context ranks, and
        one of two numbers over the replicas, where there are several.
        """
        counts = torch.stack([count_valid(b, self._batch_layout) for b in microbatches])
        samples, replica = None, counts
        if self._context_group is not None:
            replica = counts.clone()
            dist.all_reduce(replica, group=self._context_group)
        total = replica.sum()
        if self._replicas > 1:
            own = sum(batch_size(b) for b in microbatches)
            sums = torch.stack([total, total.new_tensor(own)])
            dist.all_reduce(sums, group=self._data_group)
            total, samples = sums[0], sums[1]
        zero: frozenset[int] = frozenset()
        if self._batch_layout.labels is not None:  # without labels every sample counts
            zero = frozenset(i for i, count in enumerate(replica.tolist()) if count == 0)
        valid = total.clamp(min=1)
        return BatchWeights(
            scales=tuple((counts * self._ranks / valid).unbind()),
            total=replica.sum() * self._replicas / valid,
            samples=samples,
            zero=zero,
            context_group=self._context_group,
        )
