"""What a micro-batch, a replica and a context rank weigh in the mean loss of the global batch.

Note [Weight 0]: the mean over no valid entry is NaN, and so is NaN times 0. What weighs nothing is
therefore left out, whatever its value.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import batch_entry, count_valid, has_entry
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.errors import PlanError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.upstream.functions import replaced

__all__ = [
    "MEAN_OVER_SAMPLES",
    "SUM_OVER_SAMPLES",
    "BatchWeigher",
    "BatchWeights",
    "LossRule",
    "Step",
    "count_entries",
    "declared_rule",
    "entries_unlike",
    "sum_of_class_weights",
    "sum_of_entry",
    "weigh",
    "weighted_mean",
]


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
        # Values of weight 0 were masked by `weigh` before: a NaN of one rank would reach all of
        # them.
        dist.all_reduce(sums, group=group)
    return sums[0] / sums[1], sums[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchWeights:
    """What this replica's micro-batches weigh in the global batch.

    Attributes:
        scales: For every micro-batch, ranks * (its weight) / (that of the global batch), where the
            ranks are those that see other tokens; the gradient of a mean over them of losses times
            these is that of the global mean. Of a loss that is a sum: ranks.
        total: Weight of this replica, 1 on average over the replicas.
        samples: Samples in the global batch, or None if nobody counted.
        shares: Weights of the micro-batches in a mean over this replica, as of logged values.
        is_sum: Whether losses are added.
        sums: Names of logged values that are added, too.
        by_samples: Names of logged values that weigh by the samples, whatever weighs in the loss.
        sized: Names of those that are logged with the number of samples as their `batch_size`.
        sizes: Numbers of samples of the micro-batches.
        replicas: Number of replicas.
        zero: Numbers of this replica's micro-batches whose loss has weight 0.
        fills: Whether this replica repeats a sample of another one, which counts nowhere.
        context_group: Ranks that see other tokens of the same samples; None: this one sees all.
        counts: What the rule of the loss gives for each micro-batch; None: nobody asked.
        differs: Whether replicas have batches of other lengths, a flag on the device; None: nobody
            asked.
    """

    scales: tuple[Tensor, ...]
    total: Tensor
    samples: Tensor | None
    shares: Tensor
    is_sum: bool = False
    sums: frozenset[str] = frozenset()
    by_samples: frozenset[str] = frozenset()
    sized: frozenset[str] = frozenset()
    sizes: tuple[int, ...] = ()
    replicas: int = 1
    zero: frozenset[int] = frozenset()
    fills: bool = False
    context_group: dist.ProcessGroup | None = None
    counts: Tensor | None = None
    differs: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """Weight of this rank, 1 on average over those that see other tokens."""
        return torch.stack(self.scales).sum()

    @classmethod
    def of_samples(cls, samples: Sequence[int]) -> "BatchWeights":
        """Weigh micro-batches by their samples, without asking other replicas.

        Args:
            samples: Samples of every micro-batch.
        """
        counts = torch.tensor([float(count) for count in samples])
        return cls(scales=tuple(counts.unbind()), total=counts.sum(), samples=None, shares=counts)

    @property
    def of_loss(self) -> Tensor:
        """Weight of this replica's loss in the mean over the replicas that is the global loss."""
        if not self.is_sum:
            return self.total
        return torch.full_like(self.total, 0.0 if self.fills else float(self.replicas))


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How the loss of a batch is made of the losses of its parts.

    Attributes:
        name: What the loss is, for messages: "the mean over the samples".
        weigh: Part of a batch, and its number of samples -> its weight, a float64 scalar.
        declare: What to write in a `BatchLayout` to declare it.
        is_sum: Whether the losses of the parts are added instead of averaged by their weights.
        counts_all: Whether every sample has a weight, so that no part weighs 0.
        is_uniform: Batch -> whether all its samples weigh alike.
        is_likely: Whether parts are chosen so as to tell it from others.
        path: Entry of the batch whose values weigh; None: samples do, or what nobody knows.
        ignored: Value of that entry which does not count; None: its values are added.
        shift: Columns of that entry, at its beginning, which do not count either.
        labels: Part of a batch -> the labels that the step makes of it, where it makes them.
        is_made: Whether what weighs was seen to be made by the step, of some batches.
    """

    name: str
    weigh: Callable[[Any, int], Tensor]
    declare: str
    is_sum: bool = False
    counts_all: bool = False
    is_uniform: Callable[[Any], bool] = lambda _: False
    is_likely: bool = True
    path: str | None = None
    ignored: int | None = None
    shift: int = 0
    labels: Callable[[Any], Tensor] | None = None
    is_made: bool = False


def declared_rule(layout: BatchLayout) -> LossRule:
    """Return the rule that `layout` declares, or what it is without a declaration.

    Args:
        layout: Its `loss_weight`, or else `labels`, decides.
    """
    weight = layout.loss_weight
    if weight == "samples" or (weight is None and layout.labels is None):
        return MEAN_OVER_SAMPLES
    if weight == "sum":
        return SUM_OVER_SAMPLES
    if weight is None or weight == "labels":
        return LossRule(
            name=f"the mean over the valid labels in {layout.labels!r}",
            weigh=partial(_valid, layout),
            declare="loss_weight='labels'",
        )
    if callable(weight):
        name = getattr(weight, "__qualname__", type(weight).__name__)
        rule = f"the mean weighted by {name}"
        return LossRule(name=rule, weigh=partial(_called, weight), declare=f"loss_weight={name}")
    return LossRule(
        name=f"the mean weighted by {weight!r}",
        weigh=partial(sum_of_entry, weight),
        declare=f"loss_weight={weight!r}",
    )


def _samples(batch: Any, samples: int) -> Tensor:
    # float32 counts exactly up to 2**24 only, which the tokens of a global batch may exceed.
    return torch.tensor(float(samples), dtype=torch.float64)


MEAN_OVER_SAMPLES = LossRule(
    name="the mean over the samples",
    weigh=_samples,
    declare="loss_weight='samples'",
    counts_all=True,
    is_uniform=lambda _: True,
)
SUM_OVER_SAMPLES = replace(
    MEAN_OVER_SAMPLES, name="the sum over the samples", declare="loss_weight='sum'", is_sum=True
)


def _valid(layout: BatchLayout, batch: Any, samples: int) -> Tensor:
    return count_valid(batch, layout)


def _called(weight: Callable[[Any], Any], batch: Any, samples: int) -> Tensor:
    value = torch.as_tensor(weight(batch), dtype=torch.float64)
    if value.numel() != 1:
        raise PlanError(
            "LP309",
            f"the function {getattr(weight, '__qualname__', weight)!r} of loss_weight= returned a "
            f"tensor of shape {tuple(value.shape)}, but it has to return one number: the weight "
            "of the whole batch in the loss. Return, for example, the sum over the samples.",
        )
    return value.reshape(())


def sum_of_entry(path: str, batch: Any, samples: int) -> Tensor:
    """Weigh a part of a batch by the sum of its entry at `path`."""
    if not has_entry(batch, path):
        raise PlanError(
            "LP302",
            f"the batch has no entry {path!r}, which holds the weights of the samples in the "
            "loss. Add this entry to every batch, with ones where all samples have the same "
            "weight.",
        )
    return torch.as_tensor(batch_entry(batch, path)).sum(dtype=torch.float64)


def row_length(batch: Any) -> int:
    """Return the number of entries in a row of all tensors [B, T, ...] of a batch."""
    held = [tensor for tensor in tensors_of(batch) if tensor.ndim >= 2 and tensor.shape[0]]
    return sum(tensor.numel() // tensor.shape[0] for tensor in held)


def entries_unlike(path: str, value: int, shift: int, batch: Any) -> Tensor:
    """Return where the entry at `path` differs from `value`, without its first `shift` columns."""
    entry: Tensor = batch_entry(batch, path) if path else batch
    return (entry[:, shift:] if shift else entry) != value


def count_entries(path: str, value: int, shift: int, batch: Any, samples: int) -> Tensor:
    """Weigh a part of a batch by the number of its `entries_unlike`, or by its samples where it has
    no such entry: then its loss has another form, which is looked at.
    """
    if path and not has_entry(batch, path):
        return _samples(batch, samples)
    return entries_unlike(path, value, shift, batch).sum(dtype=torch.float64)


def sum_of_class_weights(path: str, weight: Tensor, batch: Any, samples: int) -> Tensor:
    """Weigh a part of a batch by the weights [classes] of its labels at `path`."""
    return class_weights_of(batch_entry(batch, path) if path else batch, weight)


def class_weights_of(labels: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of the weights [classes] of labels."""
    # Labels outside of the classes are an ignore_index, such as -100, and weigh nothing.
    counts = (labels >= 0) & (labels < len(weight))
    return weight.to(labels.device)[labels[counts]].sum(dtype=torch.float64)


class BatchWeigher:
    """Weighs micro-batches by the rule of the loss: their labels that count, their samples, ...

    Args:
        mesh: Its replicas and context ranks see other tokens.
        rule: How the loss of a batch is made of those of its parts.

    Attributes:
        rule: It; found in the first step where it is not declared.
        alternatives: Other rules, which weighed all samples alike so far, as `rule` did.
        sums: Names of logged values that are sums over the samples, as the loss is.
        by_samples: Names of those that are means over the samples, as the loss is not.
        sized: Names of those that are logged with the number of samples as their `batch_size`.
        judged: Names of those of which it is known, or was said that it is not.
        hides_logs: Whether a number had one value in the last look of this rank, as 0: of any kind.
        fills: Whether the batch of this replica repeats a sample of another one, and weighs 0.
        compares_lengths: Whether to compare the lengths of the batches of the replicas.
        last: What was weighed last; None: nothing yet.
    """

    def __init__(self, mesh: ParallelMesh, rule: LossRule) -> None:
        sizes = mesh.sizes
        self.rule = rule
        self.alternatives: tuple[LossRule, ...] = ()
        self.sums: frozenset[str] = frozenset()
        self.by_samples: frozenset[str] = frozenset()
        self.sized: frozenset[str] = frozenset()
        self.judged: frozenset[str] = frozenset()
        self.fills = self.compares_lengths = self.hides_logs = False
        # What replicas send beside the weight, and the same on the device.
        self._numbers, self._on_device = (-1, 0, 0), torch.empty(0)
        self.last: BatchWeights | None = None
        self._ranks, self._replicas = sizes.shares, sizes.data
        self._device_type = mesh.device_type
        self._data_group = mesh.data_group
        self._context_group = mesh.group("cp") if sizes.context > 1 else None

    @property
    def is_needed(self) -> bool:
        """Whether several ranks see other tokens, so that a mean over ranks needs weights."""
        return self._ranks > 1

    def on_whole_sequences(self) -> AbstractContextManager[None]:
        """Inside, context ranks see whole sequences, each the same."""
        # Each of the ranks sees all tokens: a sum over them would count every label `cp` times.
        return replaced(self, "_context_group", None)

    def has_valid_labels(self, batch: Any) -> Tensor | None:
        """Return whether any label of a batch counts; None if every sample counts."""
        return None if self.rule.counts_all else self.rule.weigh(batch, 1) > 0

    def compare_rules(self, batch: Any, samples: int) -> tuple[float, ...]:
        """Return whether a rule weighs the samples of a batch unequally, as 0 or 1, and what each
        rule weighs a sample on average, for `is_unsettled`.

        Nothing is computed once the rule is settled. The host waits for the device of the batch.
        """
        rules = (self.rule, *self.alternatives)
        if len(rules) == 1:
            return ()
        present = [rule for rule in rules if not rule.path or has_entry(batch, rule.path)]
        differ = not all(rule.is_uniform(batch) for rule in present)
        # Per sample: batches of unequal size would differ under any rule.
        weights = (float(rule.weigh(batch, samples)) / max(samples, 1) for rule in rules)
        return float(differ), *weights

    def is_unsettled(self, compared: Sequence[float]) -> bool:
        """Tell whether rules differ in a batch of any replica, or between the batches of several,
        so that these show which rule holds; the same on every rank.

        Args:
            compared: From `compare_rules`, of the batch of this replica.

        **Communicates**: one all-reduce of a few numbers over the replicas, between the hosts.
        """
        if self._replicas == 1 or not compared:
            return bool(compared) and compared[0] > 0
        differ, *weights = compared
        # One MAX gives both ends: the largest as it is, and the smallest by its negative.
        ends = torch.tensor([differ, *weights, *(-w for w in weights)], dtype=torch.float64)
        # On the host, which has to know it.
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._data_group)
        most, least = ends[1 : len(compared)], -ends[len(compared) :]
        return bool((ends[0] > 0) | (most > least).any())

    def weigh(
        self,
        microbatches: Sequence[Any],
        samples: Sequence[int],
        zero: frozenset[int] | None = None,
    ) -> BatchWeights:
        """Return the weights of this replica's micro-batches.

        Args:
            microbatches: This rank's tokens of them, in order.
            samples: Their numbers of samples.
            zero: Numbers of those with weight 0, if they are known; else their device is asked.

        **Communicates**: one all-reduce of one number per micro-batch over the context ranks, and
        one of four numbers over the replicas, where there are several.
        """
        pairs = zip(microbatches, samples, strict=True)
        counts = torch.stack([self.rule.weigh(b, n) for b, n in pairs])
        if counts.device.type != self._device_type:
            # Without waiting for the device, as from memory that is not pinned.
            counts = counts.pin_memory().to(self._device_type, non_blocking=True)
        if self.fills:
            counts = torch.zeros_like(counts)
        replica = counts
        if self._context_group is not None:
            replica = counts.clone()
            dist.all_reduce(replica, group=self._context_group)
        total, counted, differs = self._over_replicas(replica.sum(), sum(samples), microbatches[0])
        # If nothing in the global batch counts, all weights are 0, and not NaN.
        valid = torch.where(total > 0, total, 1)
        # FSDP takes the mean over these ranks, which the factor `ranks` undoes:
        # mean(ranks * c_r / total * loss_r) = sum(c_r * loss_r) / total.
        scales = counts * self._ranks / valid
        # The losses of a sum count whole; here, too, only the mean over the ranks is undone.
        added = torch.full_like(scales, 0.0 if self.fills else float(self._ranks))
        self.last = BatchWeights(
            scales=tuple((added if self.rule.is_sum else scales).unbind()),
            total=replica.sum() * self._replicas / valid,
            samples=counted,
            shares=scales,
            is_sum=self.rule.is_sum,
            sums=self.sums,
            by_samples=self.by_samples,
            sized=self.sized,
            sizes=tuple(samples),
            replicas=self._replicas,
            zero=self._zero(replica, zero),
            fills=self.fills,
            context_group=self._context_group,
            counts=counts,
            differs=differs,
        )
        return self.last

    def _over_replicas(
        self, total: Tensor, samples: int, part: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weight of the global batch, its samples, and whether lengths differ."""
        if self._replicas == 1:
            return total, None, None
        length = row_length(part) if self.compares_lengths else 0
        numbers = (0 if self.fills else samples, length, length**2)
        if numbers != self._numbers:
            self._numbers = numbers
            self._on_device = torch.stack([torch.full_like(total, number) for number in numbers])
        # In one message, as its latency is what it costs.
        sums = torch.cat([total[None], self._on_device])
        dist.all_reduce(sums, group=self._data_group)
        # Equal numbers have the square of their mean as the mean of their squares.
        differs = sums[3] * self._replicas > sums[2].square() if self.compares_lengths else None
        return sums[0], sums[1], differs

    def _zero(self, counts: Tensor, known: frozenset[int] | None) -> frozenset[int]:
        """Return the numbers of the micro-batches that weigh nothing."""
        if self.rule.counts_all or self.fills:
            return frozenset(range(len(counts)) if self.fills else ())
        if known is not None:
            return known
        # The host waits for the device here; callers that have counted on the host spare it.
        return frozenset(i for i, count in enumerate(counts.tolist()) if count == 0)


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
