"""The cross-entropies that the user's step computes, seen from outside.

A loss that is one call of `F.cross_entropy` needs no numbers to be understood: the call says which
labels it ignores, and that it takes their mean. Ties between rules do not matter then.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.engine.tensor.chunked_logits import ChunkedLogits
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.observe.batch_tape import BatchTape, TapedTensor
from lightning_par.observe.loss_terms import LossTerms
from lightning_par.upstream.tensor import memory_key

__all__ = ["LookAtLosses", "SeenLoss", "SeenWeight"]

_LOSSES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}
_LOGITS = frozenset((F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax))
_PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__))
_QUOTIENTS = frozenset(
    (torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__)
)
_CHOICES = frozenset((torch.masked_select, Tensor.masked_select, Tensor.__getitem__))
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
        made: How the step makes the labels of the batch; None: not of the batch alone.
        classes: Weights of the classes [C], on the host; None: all weigh alike.
    """

    labels: Tensor
    ignored: int
    is_mean: bool
    value: float
    place: int | None
    made: TapedTensor | None = None
    classes: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SeenWeight:
    """A tensor that a step makes of its batch alone, and that may weigh the batch in its loss.

    Attributes:
        made: How it is made.
        chooses: Whether it is a mask that chooses entries of what the model gave, as those of
            which the loss is the mean; else it is what the step divides by.
        value: Its sum.
    """

    made: TapedTensor
    chooses: bool
    value: float


class LookAtLosses(TorchFunctionMode):
    """Notes the cross-entropies of a step on each of some batches.

    Args:
        batches: The batches.
        sharpens: Make the losses of samples differ more, by larger logits in 64 bits.

    Attributes:
        seen: For each batch, the calls.
        has_zero: Whether something was multiplied by the number 0, as a term that begins later is.
        weights: For each batch, what may weigh it besides labels.
        terms: For each batch, the terms of its losses.
    """

    def __init__(self, batches: Sequence[Any], *, sharpens: bool = False) -> None:
        super().__init__()
        self.seen: list[list[SeenLoss]] = [[] for _ in batches]
        self._batches, self.has_zero = batches, False
        self._sharpens, self._index = sharpens, 0
        self.weights: list[list[SeenWeight]] = [[] for _ in batches]
        self._tape = BatchTape(None)
        self.terms = [LossTerms() for _ in batches]

    def of(self, index: int) -> "LookAtLosses":
        """Return what surrounds the step on the batch with this number."""
        self.terms[self._index].end()
        self._index, self._tape = index, BatchTape(self._batches[index])
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._sharpens and function in _LOGITS and args and type(args[0]) is Tensor:
            args = (args[0].double() * _SHARPER, *args[1:])
        elif self._sharpens and function in _LOGITS and args and isinstance(args[0], ChunkedLogits):
            args = (args[0].like(args[0].local * _SHARPER, args[0].vocab_dim), *args[1:])
        if self._sharpens and function is F.embedding and any(map(_is_negative, args)):
            raise IndexError("index out of range in self")  # which a GPU would not survive
        # `type` and not isinstance: `mask * False` of a bool is no weight of a term.
        if function in _PRODUCTS and any(type(a) in (int, float) and not a for a in args):
            self.has_zero = True
        # The mode is off inside of its own `__torch_function__`: what `cross_entropy` itself
        # calls is not noted a second time.
        sums = self.terms[self._index]
        terms = sums.before(function, args, kwargs)
        result = function(*args, **kwargs)
        sums.note(result, terms)
        if function in _LOSSES:
            self._note(_LOSSES[function].bind(*args, **kwargs), result)
        elif len(args) > 1:
            self._note_weight(function, args)
        self._tape.note(function, args, kwargs, result)
        return result

    def _note_weight(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Note what the step divides by, or chooses by, if it is made of the batch alone."""
        value, by = args[:2]
        if not isinstance(value, Tensor) or not isinstance(by, Tensor):
            return
        if self._tape.of(value) is not None:  # of the batch as well: no loss
            return
        made = None
        if function in _QUOTIENTS:
            # Several numbers, as counts of each class: what they are bounded by is in their sum.
            made = self._tape.of(by, is_bounded=by.numel() > 1)
        elif function in _CHOICES and by.dtype == torch.bool:
            made = self._tape.of(by)
        if made is not None:
            seen = SeenWeight(made=made, chooses=function in _CHOICES, value=float(by.sum()))
            self.weights[self._index].append(seen)

    def _note(self, bound: inspect.BoundArguments, result: Any) -> None:
        bound.apply_defaults()
        given = bound.arguments
        labels = given["target"]
        # Labels that are probabilities ignore nothing.
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        # Weights of classes make another mean, which only the numbers can tell.
        classes, is_mean = given["weight"], given["reduction"] == "mean"
        is_number = isinstance(result, Tensor) and result.numel() == 1
        self.seen[self._index].append(
            SeenLoss(
                labels=labels.detach().flatten().cpu(),
                ignored=int(given["ignore_index"]),
                is_mean=is_mean and classes is None,
                value=float(result.detach()) if is_number else float("nan"),
                place=_place_of(labels, self._batches[self._index]),
                made=self._tape.of(labels),
                classes=classes.detach().cpu() if is_mean and classes is not None else None,
            )
        )


def _place_of(labels: Tensor, batch: Any) -> int | None:
    # By memory: the step may have cut or reshaped the labels (`labels[:, 1:].flatten()`).
    memory = memory_key(labels)
    held = [memory_key(tensor) for tensor in tensors_of(batch)]
    return held.index(memory) if held.count(memory) == 1 else None


def _is_negative(value: Any) -> bool:
    """Whether a tensor on a GPU holds a negative number; a CPU raises by itself."""
    is_index = isinstance(value, Tensor) and not value.is_floating_point() and value.is_cuda
    return is_index and bool((value < 0).any())
