"""The cross-entropies that the user's step computes, seen from outside.

A loss that is one call of `F.cross_entropy` needs no numbers to be understood: the call says which
labels it ignores, and that it takes their mean. Ties between rules do not matter then.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.engine.batch import batch_entry
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.strategies.step.batch_weights import LossRule
from lightning_par.strategies.step.metrics import LookAtMetrics

__all__ = ["LookAtLosses", "LookAtStep", "SeenLoss", "labels_seen", "rules_seen"]

_LOSSES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}
_LOGITS = (F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SHARPER = 8.0
"""Factor of logits: the losses of samples of a model that knows nothing yet differ by little."""


@dataclass(frozen=True, kw_only=True)
class SeenLoss:
    """One call of a cross-entropy.

    Attributes:
        labels: Its labels, flat, on the host.
        ignored: The label that it ignores.
        is_mean: Whether it takes the mean over the others, all of which weigh alike.
        value: What it returned, where that is one number.
        place: Which of the tensors of the batch holds the labels; None: they were copied.
    """

    labels: Tensor
    ignored: int
    is_mean: bool
    value: float
    place: int | None


class LookAtLosses(TorchFunctionMode):
    """Notes the cross-entropies of a step on each of some batches.

    Args:
        batches: The batches.
        sharpens: Make the losses of samples differ more, by larger logits in 64 bits.

    Attributes:
        seen: For each batch, the calls.
        has_zero: Whether something was multiplied by the number 0, as a term that begins later is.
    """

    def __init__(self, batches: Sequence[Any], *, sharpens: bool = False) -> None:
        super().__init__()
        self.seen: list[list[SeenLoss]] = [[] for _ in batches]
        self._batches, self.has_zero = batches, False
        self._sharpens, self._index = sharpens, 0

    def of(self, index: int) -> "LookAtLosses":
        """Return what surrounds the step on the batch with this number."""
        self._index = index
        return self

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._sharpens and function in _LOGITS and args and type(args[0]) is Tensor:
            args = (args[0].double() * _SHARPER, *args[1:])
        if self._sharpens and function is F.embedding and any(map(_is_negative, args)):
            raise IndexError("index out of range in self")  # which a GPU would not survive
        if function in _PRODUCTS and any(type(a) in (int, float) and not a for a in args):
            self.has_zero = True
        result = function(*args, **kwargs)
        if function in _LOSSES:
            self._note(_LOSSES[function].bind(*args, **kwargs), result)
        return result

    def _note(self, bound: inspect.BoundArguments, result: Any) -> None:
        bound.apply_defaults()
        given = bound.arguments
        labels = given["target"]
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        is_mean = given["reduction"] == "mean" and given["weight"] is None
        is_number = isinstance(result, Tensor) and result.numel() == 1
        self.seen[self._index].append(
            SeenLoss(
                labels=labels.detach().flatten().cpu(),
                ignored=int(given["ignore_index"]),
                is_mean=is_mean,
                value=float(result.detach()) if is_number else float("nan"),
                place=_place_of(labels, self._batches[self._index]),
            )
        )


class LookAtStep:
    """What a look at a step sees besides losses and logs.

    Args:
        module: The user's LightningModule.
        batches: Those on which it runs.
        sharpens: See `LookAtLosses`.
        group: See `LookAtMetrics`.

    Attributes:
        metrics: Of the module.
        losses: Cross-entropies that the step computes.
        has_written: Tells whether it has written to the terminal or a file.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Sequence[Any],
        *,
        sharpens: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.metrics = LookAtMetrics(module, group)
        self.losses = LookAtLosses(batches, sharpens=sharpens)
        self.has_written: Callable[[], bool] = lambda: False

    def followed(self, index: int) -> ExitStack:
        """Surrounds the step on the batch with this number."""
        stack = self.metrics.followed(index)
        stack.enter_context(self.losses.of(index))
        return stack


def _place_of(labels: Tensor, batch: Any) -> int | None:
    storage = labels.untyped_storage().data_ptr()
    held = [tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)]
    return held.index(storage) if held.count(storage) == 1 else None


def _is_negative(value: Any) -> bool:
    """Whether a tensor on a GPU holds a negative number; a CPU raises by itself."""
    is_index = isinstance(value, Tensor) and not value.is_floating_point() and value.is_cuda
    return is_index and bool((value < 0).any())


def rules_seen(
    rules: Sequence[LossRule],
    losses: Sequence[tuple[float, ...]],
    seen: Sequence[Sequence[SeenLoss]],
    parts: Sequence[tuple[Any, int]],
) -> frozenset[str] | None:
    """Return the names of the rules that a loss follows if it is one cross-entropy with a mean;
    None if it is not.

    Args:
        rules: The rules that it may follow.
        losses: For each batch, one of every backward.
        seen: For each batch, the calls of a cross-entropy.
        parts: The batches, with their numbers of samples.
    """
    if not seen or any(len(loss) != 1 for loss in losses) or len({*map(len, seen)}) != 1:
        return None
    for calls in zip(*seen, strict=True):
        pairs = [(call.value, loss[0]) for call, loss in zip(calls, losses, strict=True)]
        if not all(call.is_mean for call in calls) or not _are_proportional(pairs):
            continue
        counts = [float((call.labels != call.ignored).sum()) for call in calls]
        fitting = [
            rule
            for rule in rules
            if all(float(rule.weigh(*part)) == n for part, n in zip(parts, counts, strict=True))
        ]
        named = [
            rule
            for rule in fitting
            if rule.ignored == calls[0].ignored
            and all(_is_entry(rule, part[0], c) for part, c in zip(parts, calls, strict=True))
        ]
        # Labels that the step copied may come from any entry that has as many.
        is_sure = bool(named) and all(call.place is not None for call in calls)
        return frozenset(rule.name for rule in (named if is_sure else fitting))
    return None


def labels_seen(
    rules: Sequence[LossRule],
    seen: Sequence[Sequence[SeenLoss]],
    parts: Sequence[tuple[Any, int]],
) -> frozenset[str]:
    """Return the entries of a batch that a cross-entropy takes as labels, as they are: these may
    hold the label that it ignores.
    """
    return frozenset(
        rule.path
        for rule in rules
        for calls, part in zip(seen, parts, strict=False)
        for call in calls
        if rule.path is not None
        and rule.ignored == call.ignored
        and call.place is not None
        and _is_entry(rule, part[0], call)
    )


def _are_proportional(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether losses are the values of a call, or all the same number of times that."""
    if all(value == loss for value, loss in pairs):
        return True
    factors = [loss / value for value, loss in pairs if value]
    if len(factors) < 2 or len(factors) < len(pairs):
        return False
    return max(factors) - min(factors) <= 1e-6 * abs(factors[0])


def _is_entry(rule: LossRule, batch: Any, call: SeenLoss) -> bool:
    """Whether a rule counts the labels of a call, which may have been shifted."""
    if rule.path is None:
        return False
    entry = batch_entry(batch, rule.path) if rule.path else batch
    if not isinstance(entry, Tensor):
        return False
    if call.place is not None and list(tensors_of(batch))[call.place] is not entry:
        return False
    entry = entry.cpu()
    if not rule.shift:
        return torch.equal(entry.flatten(), call.labels)
    shifted = entry[:, 1:]
    padded = F.pad(shifted, (0, 1), value=call.ignored) if shifted.ndim == 2 else shifted
    return any(torch.equal(found.flatten(), call.labels) for found in (shifted, padded))
