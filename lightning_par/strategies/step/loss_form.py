"""Notices when the loss of a run takes another form than in the first step, or other weights.

Note [Form of a loss]: a term that begins after some steps, a mean that becomes a sum, or a choice
of samples makes other operations at the end of the autograd graph. Reading their names takes some
microseconds and no device. A rank that meets a new form poisons the norm which all ranks compute
before the optimizer step, so that all of them look at the step once more; nobody communicates
while the form stays. So does a part of a batch that weighs nothing, as nothing counts in it, if its
loss is a number other than 0: the step divides by a bound there, and one process would not leave
the part out.

A loss may bend a number that is made of all samples: a lower bound of a mean, the distance to a
value, a maximum over samples. Its parts add up only while all of them are on one side of the bend.
So each part tells on which side it is, all ranks agree on one, and a step whose parts are on
several is refused.

The graph also holds the numbers of which a loss is a mean: the labels that a cross-entropy counts,
a divisor. Each step confirms by them the rule that weighs batches, which was seen on the first ones
only; the device compares, and poisons the norm as well, so that the host does not wait.

A step may choose samples by what the model says of them: pseudo-labels above a confidence, hard
examples above a loss. Its first batches may choose all of them, or none, and add up. So a number of
which the loss is a mean that is neither that of the first step nor a multiple of what weighs, and a
mask that is not all 0 or all 1 any more, poison the norm, too. A part of which top-k takes all
samples, as it has no more, cannot choose as the whole batch does; it is refused.

Length: what is read of the graph of a loss is in one file, as each step enters it.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.step.batch_weights import BatchWeights, LossRule

__all__ = ["Confirmed", "FormWatch", "LossGraph", "choices_of", "form_of", "sides_of", "takes_all"]

_NODES = 32
"""Operations of the graph that are read, from the loss on."""
_CLOSE = 1e-5
"""Relative difference between two counts in float32 that is rounding."""
_BENDS = {
    "AbsBackward": ("self", ""),
    "ReluBackward": ("result", ""),
    "ClampMinBackward": ("self", "min"),
    "ClampMaxBackward": ("self", "max"),
    "MaximumBackward": ("self", "other"),
    "MinimumBackward": ("self", "other"),
}
"""Operation -> names of what it keeps of its call: the number that is bent or made, and the place
of the bend; without a name it is at 0."""
_EXTREMES = ("MaxBackward", "MinBackward", "AmaxBackward", "AminBackward")
"""Operations that choose a sample. Its loss adds up while it is 0 for all samples."""
_FORMS = 16
"""Forms after which nobody looks any more: they follow the data, and each held so far."""
_CHOICES = 4
"""Looks at a step whose numbers or masks have changed, after which nobody looks any more."""
_MASKS = {"MulBackward": ("other", "self"), "WhereBackward": ("condition",)} | {
    "MaskedFillBackward": ("mask",)
}
"""Operations that leave samples out -> names of the mask that they keep of their call."""
_LAYERS = ("mmBackward", "MmBackward", "LayerNorm", "RmsNorm", "BatchNorm", "Convolution")
"""Parts of the names of operations of a model. What is kept before them may be recomputed."""
_SELECTIONS = ("IndexBackward", "MaskedSelectBackward")
"""Operations that choose samples."""


class LossGraph(NamedTuple):
    """The last operations that made a loss; None where there is no graph.

    Attributes:
        nodes: From the loss on, also those of the model.
        own: Those up to the last layers of the model.
    """

    nodes: list[Any]
    own: list[Any]

    @classmethod
    def of(cls, loss: Tensor) -> "LossGraph":
        """Walk the graph of a loss, which has one."""
        found = cls([], [])
        queue = deque([(loss.grad_fn, True)])
        while queue and len(found.own) < _NODES:
            node: Any
            node, is_own = queue.popleft()
            if is_own:
                found.own.append(node)
            is_last = len(found.nodes) == _NODES
            if not is_last:
                found.nodes.append(node)
            if node is not None:
                is_own = is_own and not _is_layer(node.name())
                if is_own or not is_last:
                    queue.extend((parent, is_own) for parent, _ in node.next_functions)
        return found


def form_of(graph: LossGraph, samples: int, *, reads_factors: bool = False) -> tuple[Hashable, ...]:
    """Return the last operations that made a loss, as a value to compare.

    Args:
        graph: Of the loss.
        samples: Their number; a mean over them, or their tokens, has a multiple of entries.
        reads_factors: Whether to tell factors that are 0 from others. What checkpointing recomputes
            would be recomputed for that.
    """
    form = list[Hashable]()
    for node in graph.nodes:
        # No graph behind this input, as behind a constant: it is part of the form, too.
        if node is None:
            form.append(None)
            continue
        name = node.name()
        form.append(name)
        if name == "MulBackward0" and reads_factors:
            form.append(any(_is_zero(_saved(node, factor)) for factor in ("self", "other")))
        # torch.add(loss, term, alpha=weight): a weight of 0 that a schedule raises later.
        elif name in ("AddBackward0", "SubBackward0"):
            form.append(_saved(node, "alpha") == 0)
        elif name == "MeanBackward0":
            form.append(_saved(node, "self_sym_numel") % samples == 0)
        elif name.startswith("NllLoss"):
            form.append((_saved(node, "reduction"), _saved(node, "ignore_index")))
    return tuple(form)


def _is_layer(name: str) -> bool:
    return not name[-1].isdigit() or any(part in name for part in _LAYERS)


def sides_of(graph: LossGraph) -> Iterator[Hashable]:
    """Yield on which side of each bend a loss is, see Note [Form of a loss]; none: it has no bend.

    The host waits for the device, if there is one.
    """
    for node in filter(None, graph.nodes):
        name = node.name().rstrip("0123456789")
        if name in _BENDS:
            value, other = (_saved(node, key) for key in _BENDS[name])
            # A tensor with a dim of samples, even of one, bends each of them by itself.
            if isinstance(value, Tensor) and not value.ndim:
                yield name, bool(value > other)
        elif name in _EXTREMES:
            value = _saved(node, "result")
            if isinstance(value, Tensor) and not value.ndim:
                yield name, bool(value != 0)
        elif name == "ClampBackward":
            value, low, high = (_saved(node, key) for key in ("self", "min", "max"))
            if isinstance(value, Tensor) and not value.ndim:
                yield (
                    name,
                    low is not None and bool(value < low),
                    high is not None and bool(value > high),
                )


def choices_of(graph: LossGraph) -> Iterator[tuple[str, Tensor | int]]:
    """Yield what may choose samples in a loss: the masks by which it weighs them, and numbers by
    which it divides. Each with the name of its operation.
    """
    for node in filter(None, graph.own):
        name = node.name().rstrip("0123456789")
        if name == "DivBackward":
            divisor = _kept(node, "other")
            # One with a dim of samples divides each of them by its own number.
            if isinstance(divisor, Tensor) and not divisor.ndim:
                yield name, divisor.detach()
        elif name == "MeanBackward":
            parent = node.next_functions[0][0]
            if parent is not None and parent.name().startswith(_SELECTIONS):
                yield name, _saved(node, "self_sym_numel")
        for key in _MASKS.get(name, ()):
            mask = _kept(node, key)
            if isinstance(mask, Tensor) and mask.ndim and not mask.requires_grad:
                yield name, mask


def takes_all(graph: LossGraph, samples: int) -> bool:
    """Return whether a loss chooses the first of its samples by top-k, but takes all there are.

    Args:
        graph: Of the loss.
        samples: Their number.
    """
    for node in filter(None, graph.own):
        if node.name().startswith("TopkBackward"):
            sizes, chosen = _saved(node, "self_sym_sizes"), _kept(node, "indices")
            # Of more dims, the last one, as a rule, which is of classes.
            if isinstance(chosen, Tensor) and tuple(sizes) == (samples,) == tuple(chosen.shape):
                return True
    return False


def _means_over(graph: LossGraph, *, of_labels: bool) -> Iterator[Tensor | int]:
    """Yield the numbers over which a loss is a mean, as far as its last operations hold them; those
    `of_labels` are those of cross-entropies alone.
    """
    for node in filter(None, graph.nodes):
        name = node.name()
        if name.startswith("NllLoss") and _saved(node, "reduction") == 1:
            yield _saved(node, "total_weight")
            if node is graph.nodes[0]:  # it is all of the loss
                return
        elif name == "DivBackward0" and not of_labels:
            divisor = _saved(node, "other")
            if isinstance(divisor, Tensor) and divisor.numel() == 1:
                yield divisor.reshape(())
        elif name == "MeanBackward0" and not of_labels:
            yield _saved(node, "self_sym_numel")


def _saved(node: Any, name: str) -> Any:
    """Return what an operation keeps of its call; torch's notes on autograd tell of the prefix."""
    return getattr(node, f"_saved_{name}", 0)


def _kept(node: Any, name: str) -> Any:
    """Return a tensor that an operation keeps of its call; None where reading it would compute it
    anew and keep all that is computed with it, as in a checkpoint, or fetch it, as with offload.
    """
    hook = getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None)
    return _saved(node, name) if hook is None else None


def _is_zero(factor: Any) -> bool:
    """Whether a factor is the number 0; a tensor on a device is not asked."""
    is_number = isinstance(factor, Tensor) and factor.ndim == 0 and factor.device.type == "cpu"
    return is_number and not factor


@dataclass(frozen=True)
class Confirmed:
    """A rule by which batches weigh, and how each step confirms it.

    Attributes:
        rule: Its name.
        ratios: Numbers over which the losses of the first batches were a mean, as multiples of what
            the rule gives for these batches; none: those of the first step.
        of_labels: Whether only the labels that a cross-entropy counts are such numbers.
    """

    rule: str
    ratios: frozenset[float]
    of_labels: bool

    @classmethod
    def of(cls, rule: LossRule, ratios: frozenset[float] | None) -> "Confirmed | None":
        """Return how steps confirm a rule whose ratios were seen; None: no step can."""
        is_of_labels = rule.labels is not None or not rule.is_made
        return cls(rule.name, ratios, is_of_labels) if ratios else None


class _Choices:
    """Compares the numbers and masks of a loss with those of the first step that had as many.

    Attributes:
        differ: Whether they differ in the present step; a bool, or a tensor on the device.
        looks: Looks that they have caused so far.
    """

    def __init__(self) -> None:
        self.differ: Tensor | bool | None = None
        self.looks = 0
        self._first = dict[tuple[str, ...], list[tuple[Tensor | int | None, Tensor | int]]]()
        self._learns = tuple[str, ...]()

    def see(self, graph: LossGraph, samples: int, weight: Tensor | int) -> None:
        """Compare a part of a batch.

        Args:
            graph: Of its loss.
            samples: Their number.
            weight: What it weighs.
        """
        if self.looks > _CHOICES:
            return
        found = list(choices_of(graph))
        names = tuple(name for name, _ in found)
        if not found or (names not in self._first and len(self._first) >= _FORMS):
            return
        # Nothing counts in this part: it tells nothing of what others choose.
        is_empty: Any = weight == 0
        for _, value in found:
            if isinstance(value, int) or not value.ndim:
                is_empty = is_empty | (value == 0)
        if names not in self._first:
            if bool(is_empty):
                return
            self._learns = names
            self._first[names] = [(_common(value), weight) for _, value in found]
        elif names == self._learns:  # the first step has several parts
            known = self._first[names]
            for index, (_, value) in enumerate(found):
                if isinstance(value, Tensor) and value.ndim and _differs(value, known[index][0]):
                    known[index] = None, weight
        for (_, value), (first, before) in zip(found, self._first[names], strict=True):
            if first is None:
                continue
            if isinstance(value, Tensor) and value.ndim:
                is_other: Any = (value != first).any()
            else:
                # Two quotients as products: no divisor is 0.
                made: Any = value * before
                is_other = (value != first) & (abs(made - first * weight) > _CLOSE * abs(made))
                # Of tokens, whose number may follow the longest row.
                is_other &= samples == 1 or value % samples != 0
            is_other = is_other > is_empty  # and not
            self.differ = is_other if self.differ is None else self.differ | is_other

    def end(self) -> None:
        """Forget what was compared in a step."""
        self.differ, self._learns = None, ()


def _common(value: Tensor | int) -> Tensor | int | None:
    """Return a number, or that of which a mask is full; None: it holds several. The host waits."""
    if isinstance(value, int) or not value.ndim or not value.numel():
        return None if isinstance(value, Tensor) and not value.numel() else value
    number = value.flatten()[0].clone()  # without the memory of the mask
    return None if _differs(value, number) or bool((number != 0) & (number != 1)) else number


def _differs(mask: Tensor, number: Tensor | int | None) -> bool:
    return number is None or bool((mask != number).any())


class FormWatch:
    """Watches the form of the loss, see Note [Form of a loss].

    Args:
        device: Device on which ranks agree.
        has_values: Whether losses have values, by which a step can confirm a rule.

    Attributes:
        again: Looks at the step of the present batch once more, on every rank; takes whether only
            values of the loss have changed, which the rule in use may bear.
        look_at_padding: Looks whether padding weighs in the loss of that batch, on every rank.
        reads_factors: Whether a term of the loss had the factor 0, and may get another one.
        is_new: Whether the loss of this rank has a form that was not looked at.
        loses: Whether a part of the present batch weighs nothing, and has a loss.
        watches: Whether the loss of the present batch can be looked at.
        has_to_stay: Whether the loss has to keep the form in which it was looked at.
        confirms: What each step has to confirm; None: nothing.
    """

    def __init__(self, device: torch.device, *, has_values: bool = True) -> None:
        self.again: Callable[[bool], None] = lambda _: None
        self.look_at_padding: Callable[[], None] = lambda: None
        self.reads_factors = False
        self.is_new, self.watches, self.has_to_stay = False, True, False
        self.loses = False
        self.confirms: Confirmed | None = None
        self._device, self._has_values, self._known = device, has_values, set[Hashable]()
        self._is_other: Tensor | None = None
        self._differs: Tensor | None = None
        self._side: Hashable = None
        self._sides = set[Hashable]()  # of the parts of the present batch
        self._choices, self._takes_all = _Choices(), False

    @property
    def is_asked(self) -> bool:
        """Whether losses have to be seen."""
        return self.has_to_stay or self.confirms is not None

    def see(self, loss: Tensor, samples: int, weights: BatchWeights | None, index: int = 0) -> None:
        """Note the form of the loss of a batch, or of a micro-batch, and whether it is a mean over
        as many as the rule of the loss says.

        Args:
            loss: A scalar, with a graph.
            samples: Their number.
            weights: What the micro-batches weigh; None: there is one, and nobody weighs it.
            index: Number of this one.
        """
        if loss.grad_fn is None:
            return
        if not index and weights is not None:
            self._differs = weights.differs
        # The host waits for the device, in the rare batch with a part in which nothing counts.
        if self.has_to_stay and weights is not None and index in weights.zero and not weights.fills:
            self.loses |= 0 < abs(float(loss.detach())) < math.inf
        graph = LossGraph.of(loss)
        confirms = self.confirms if self._has_values else None
        fills = weights is not None and weights.fills  # a repeated sample, which counts nowhere
        if confirms and weights is not None and weights.counts is not None and not fills:
            self._confirm(confirms, graph, weights.counts[index])
        self._see_form(graph, samples)
        if self.watches and (not index or self._sides):
            self._see_side(graph)
        # What a rule was seen to make of the batch is confirmed above; a part in which nothing
        # counts has no mask or divisor to compare.
        is_made = confirms is not None and not confirms.of_labels
        is_told = not fills and not is_made and not (weights and index in weights.zero)
        if self.has_to_stay and self.watches and is_told:
            said = None if weights is None else weights.counts
            self._choices.see(graph, samples, samples if said is None else said[index])
            self._takes_all |= takes_all(graph, samples)

    def _confirm(self, confirmed: Confirmed, graph: LossGraph, said: Tensor) -> None:
        means = list(_means_over(graph, of_labels=confirmed.of_labels))
        if not means:
            return
        if not confirmed.ratios:  # learned from the first step, for which the host waits
            ratios = frozenset(float(mean / said) for mean in means if said)
            self.confirms = replace(confirmed, ratios=ratios)
            return
        is_other: Tensor | None = None
        for mean in means:
            for ratio in confirmed.ratios:
                # Equal counts are equal numbers: one operation of the device.
                is_count = confirmed.of_labels and ratio == 1
                each = said if is_count else said * ratio
                is_far: Any = each != mean if is_count else (each - mean).abs() > _CLOSE * each
                is_other = is_far if is_other is None else is_other & is_far
        assert is_other is not None
        if not confirmed.of_labels:  # a divisor has a bound where nothing counts
            is_other &= said > 0
        self._is_other = is_other if self._is_other is None else self._is_other | is_other

    def marked(self, loss: Tensor) -> Tensor:
        """Return a loss, or NaN where all ranks have to be told that something is wrong with it."""
        if self.is_new or self.loses or self._takes_all:
            return torch.full_like(loss, torch.nan)
        for flag in (self._is_other, self._differs, self._choices.differ):
            if flag is not None:
                flag = torch.as_tensor(flag, device=loss.device)
                loss = torch.where(flag, torch.nan, loss)
        return loss

    def end(self, *, is_judged: bool) -> None:
        """Forget what was noted of a step; warn of it if nobody has judged the step."""
        # A judged step is not asked: the host would wait for the device.
        if self.is_new or (not is_judged and self._is_other_loss()):
            self._warn()
            if not is_judged:  # nor is a later one, in which masks would be compared in vain
                self._choices.looks = _CHOICES + 1
        self._forget()

    def _is_other_loss(self) -> bool:
        flags = self.loses, self._takes_all, self._is_other, self._choices.differ
        return any(flag is not None and bool(flag) for flag in flags)

    def _forget(self) -> None:
        self.is_new = self.loses = self._takes_all = False
        self._choices.end()
        self._is_other = self._differs = None
        self._sides = set()

    def _see_form(self, graph: LossGraph, samples: int) -> None:
        # Forms that follow the data never settle; each new one costs a look at the step.
        if not self.watches or len(self._known) > _FORMS:
            return
        form = form_of(graph, samples, reads_factors=self.reads_factors)
        if form in self._known:
            return
        # The first form is the one that the first look has seen.
        self.is_new |= bool(self._known)
        self._known.add(form)

    def _see_side(self, graph: LossGraph) -> None:
        if side := tuple(sides_of(graph)):
            self._sides.add(side)
            self.is_new |= side != self._side

    def _agree_on_side(self) -> None:
        """Refuse a step whose parts are on several sides of a bend of the loss.

        **Communicates**: what the ranks have seen, over all ranks.
        """
        found: list[set[Hashable]] = [set()] * dist.get_world_size()
        dist.all_gather_object(found, self._sides)
        sides = set().union(*found)
        if len(sides) > 1:
            raise ConfigurationError(
                "LP309",
                "training_step: the loss applies a bound, an absolute value or a maximum to a "
                "number that is computed from all samples of a batch, such as clamp(loss.mean()). "
                "In this batch, micro-batches or replicas are on different sides of the bound, so "
                "that their losses do not add up to the loss of the batch. Apply the bound to the "
                "loss of each sample, before the mean; or use num_microbatches=1 and "
                "data_parallel_size=1. No weight was changed in this step.",
            )
        self._side = next(iter(sides))

    def _warn(self) -> None:
        warnings.warn(
            "the formula or the weights of the loss have changed since the first step. They are "
            "not checked again if the loss is scaled (16-mixed) or with on_nonfinite='ignore'. To "
            "check them, train with bf16-mixed or float32 and on_nonfinite='raise'; or use one "
            "formula of the loss in all steps.",
            stacklevel=2,
        )

    def settle(self) -> bool:
        """Look at the step once more if the loss of any rank has a new form; tell whether it has.

        Every rank has to call this.

        Raises:
            ConfigurationError: On every rank, if the loss of any is a mean over another number than
                its batch weighs, or one that weighs nothing is not left out by one process.

        **Communicates**: one all-reduce of seven numbers over all ranks; then what `again` does.
        """
        # Every rank votes, as only those that met the new form know of it.
        flags = self._is_other, self._differs, self._choices.differ
        votes = [self.is_new, self.loses, self._takes_all, bool(self._sides)]
        votes += [flag is not None and bool(flag) for flag in flags]
        found = torch.tensor(votes, device=self._device, dtype=torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        is_new, loses, takes_all, has_sides, is_other, differs, varies = map(bool, found.tolist())
        if is_new and has_sides:
            self._agree_on_side()
        self._forget()
        self._choices.looks += varies
        if loses:
            raise ConfigurationError(
                "LP309",
                "training_step: in its first batches the loss was a mean over the valid labels or "
                "samples. In this batch, a micro-batch or replica has no valid one, but its loss "
                "is not 0: the step divides by a bound such as max(count, 1). A run on one process "
                "divides by the count of the whole batch. Give each micro-batch and replica a "
                "valid label, or divide by the number of samples, or use num_microbatches=1 and "
                "data_parallel_size=1. No weight was changed in this step.",
            )
        if is_other:
            assert self.confirms is not None
            raise ConfigurationError(
                "LP309",
                f"training_step: in its first batches the loss was {self.confirms.rule}, and the "
                "losses of micro-batches, replicas or context ranks were weighted by this rule. "
                "The loss of this batch is a mean over a different number of labels or samples. "
                "Declare the ignored label in ParallelPlan(batch=BatchLayout(labels=..., "
                "ignore_index=...)), or pass BatchLayout(loss_weight=...) a function of the batch "
                "that returns the number of labels or samples over which the loss is averaged. No "
                "weight was changed in this step.",
            )
        if differs:
            self.look_at_padding()
        if is_new or varies:
            self.again(not is_new)
        if takes_all:
            raise ConfigurationError(
                "LP309",
                "training_step: the loss selects some samples of a batch by topk, but a "
                "micro-batch or replica has so few samples that all of them are selected. A run on "
                "one process selects from all samples of the batch. Use num_microbatches=1 and "
                "data_parallel_size=1, or select within each sample, such as its hardest tokens. "
                "No weight was changed in this step.",
            )
        return is_new or varies or differs
