"""Logits of a linear head that are computed in chunks of tokens, where a loss asks for them.

Shapes: N tokens, D model dim, V vocabulary; a rank holds V/tp rows of the head's weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.overrides import handle_torch_function, has_torch_function, TorchFunctionMode

from lightning_par.engine.collectives import all_gather, gather_from_shards, split_sizes
from lightning_par.engine.pipeline.split_backward import undeferred
from lightning_par.engine.tensor.chunked_loss import ChunkedLoss
from lightning_par.engine.tensor.chunks import chunk_tokens
from lightning_par.engine.tensor.vocab_parallel import linked_logits, VocabShardedLogits
from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.upstream.tensor import asks_for_changes

__all__ = ["ChunkedHead", "ChunkedLogits", "LossOptions", "chunked_logits", "linear_cross_entropy"]

_CASTS = (Tensor.float, Tensor.double, Tensor.to)
_OF_MEMORY = (Tensor.untyped_storage, Tensor.data_ptr, asks_for_changes)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How a head's logits are computed, and what their loss is beside the cross-entropy.

    Attributes:
        soft_cap: c of ``c tanh(logits / c)``, which the logits then are; None: they are not capped.
        z_loss: Factor of the squared log-sum-exp that is added to the loss of every token.
        chunk_size: Tokens whose logits are there at once; None: see `chunk_tokens`.

    Raises:
        ConfigurationError: A value is out of range; lists every problem.
    """

    soft_cap: float | None = None
    z_loss: float = 0.0
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        given = (
            ("soft_cap", "greater than 0", self.soft_cap is None or self.soft_cap > 0),
            ("z_loss", "0 or more", self.z_loss >= 0),
            ("chunk_size", "1 or more", self.chunk_size is None or self.chunk_size >= 1),
        )
        problems = [
            f"{n}={getattr(self, n)} must be {rule}." for n, rule, fits in given if not fits
        ]
        raise_problems(ConfigurationError, "LP902", problems)


_PLAIN = LossOptions()


class ChunkedLogits(VocabShardedLogits):
    """Logits [..., V] of a linear head that are not computed: hidden states and weights are kept.

    `F.cross_entropy` on it (also after reshaping, slicing or casting) and `argmax` compute chunks
    of them. Any other operation computes the whole logits, so that any code that treats it as a
    tensor is right.
    """

    weight: Tensor
    bias: Tensor | None
    options: LossOptions
    what = "are computed in chunks"
    instead = "compute all logits at once (chunked_loss=False)"

    @staticmethod
    def make(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        size: int,
        group: Any = None,
        vocab_dim: int = -1,
        dtype: torch.dtype | None = None,
    ) -> "ChunkedLogits":
        """Wrap what makes the logits.

        Args:
            hidden: [..., D].
            weight: [V/tp, D].
            bias: [V/tp], or None.
            options: Soft cap, z-loss and size of chunks.
            size: V.
            group: The tensor-parallel ranks; None: this rank has all columns.
            vocab_dim: Which dim of `hidden` is D, and of the logits V.
            dtype: Of the logits; None: that of the hidden states.
        """
        dim = vocab_dim % hidden.ndim
        shape = (*hidden.shape[:dim], size, *hidden.shape[dim + 1 :])
        dtype = dtype or hidden.dtype

        def back(grad: Tensor) -> Sequence[Tensor | None]:
            own = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in held]
            given: Any = (*own, options, size, group, dim, dtype)
            with torch.enable_grad():
                whole = ChunkedLogits.make(*given).full()
            wanted = [t for t in own if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(whole, wanted, grad))
            return [next(found) if t is not None and t.requires_grad else None for t in own]

        held = hidden, weight, bias
        made: ChunkedLogits = linked_logits(ChunkedLogits, shape, dtype, held, back)
        made.local, made.weight, made.bias = hidden, weight, bias
        made.options, made.group, made.vocab_dim = options, group, dim
        return made

    def changed(self, vocab_dim: int, **changes: Any) -> "ChunkedLogits":
        """Return other logits of the same head: `changes` are arguments of `make`."""
        with torch.DisableTorchFunctionSubclass():
            size, dtype = self.shape[self.vocab_dim], self.dtype
        held: dict[str, Any] = {
            "hidden": self.local,
            "weight": self.weight,
            "bias": self.bias,
            "dtype": dtype,
        }
        held |= {"options": self.options, "size": size, "group": self.group, **changes}
        return ChunkedLogits.make(vocab_dim=vocab_dim, **held)

    def like(self, local: Tensor, vocab_dim: int = -1) -> "ChunkedLogits":
        """Return the same logits in another shape."""
        return self.changed(vocab_dim, hidden=local)

    def sharded(self, size: int, group: Any) -> "ChunkedLogits":
        """Return logits of which these are the columns of this rank.

        Args:
            size: V.
            group: The tensor-parallel ranks.
        """
        return self.changed(self.vocab_dim, size=size, group=group)

    @property
    def tokens_at_once(self) -> int:
        """Tokens whose logits are there at once."""
        tokens = self.local.numel() // max(1, self.local.shape[self.vocab_dim])
        columns, dim = self.weight.shape
        return self.options.chunk_size or chunk_tokens(tokens, columns, dim)

    def full(self) -> Tensor:
        """Return the whole logits as a plain tensor; differentiable.

        **Communicates**: with sharded weights one all-gather over the tensor-parallel ranks.
        """
        with torch.DisableTorchFunctionSubclass():
            size, dtype = self.shape[self.vocab_dim], self.dtype
        logits = F.linear(self.local.movedim(self.vocab_dim, -1), self.weight, self.bias).to(dtype)
        if (cap := self.options.soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.group is not None:
            logits = gather_from_shards(logits, -1, self.group, size)
        return logits.movedim(-1, self.vocab_dim)

    def answer(
        self, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Answer from chunks, or from the hidden states, where that is exact."""
        if func in _OF_MEMORY:
            return func(self.local)  # writes to these change the logits
        if getattr(func, "__name__", "") == "__get__":
            name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
            source = self.local if self.local.requires_grad else self.weight
            if name in ("requires_grad", "grad_fn", "is_leaf"):
                return func(source)
        if func is Tensor.register_hook:
            raise ConfigurationError(
                "LP902",
                "a hook was registered (register_hook) on logits that are computed in chunks. The "
                "hook would never be called, since the gradient of all logits is never computed "
                "at once. Register the hook on the hidden states, or compute all logits at once "
                "(chunked_loss=False).",
            )
        if func in _CASTS:
            with torch.DisableTorchFunctionSubclass():
                cast = func(torch.empty(0, dtype=self.dtype, device=self.device), *rest, **kwargs)
            is_here = cast.device == self.local.device
            return self.changed(self.vocab_dim, dtype=cast.dtype) if is_here else NotImplemented
        if func is Tensor.detach:
            held = self.local.detach(), self.weight.detach()
            bias = None if self.bias is None else self.bias.detach()
            return self.changed(self.vocab_dim, hidden=held[0], weight=held[1], bias=bias)
        if func in (Tensor.clone, Tensor.contiguous):
            return self.like(self.local, self.vocab_dim)
        if func is F.cross_entropy:
            return _cross_entropy(self, *rest, **kwargs)
        if func in (Tensor.argmax, torch.argmax) and self.vocab_dim == self.local.ndim - 1:
            dims = [*rest, *kwargs.values()]
            return _most_likely(self) if dims in ([-1], [self.vocab_dim]) else NotImplemented
        return super().answer(func, rest, kwargs)


def _cross_entropy(
    x: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` with the vocabulary where torch has the classes."""
    classes = 0 if x.local.ndim == 1 else 1
    plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or target.is_floating_point() or x.vocab_dim != classes:
        return NotImplemented
    with torch.DisableTorchFunctionSubclass():
        size, dtype = x.shape[classes], x.dtype
    hidden = x.local.movedim(classes, -1)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    valid = labels != ignore_index
    outside = valid & ((labels < 0) | (labels >= size))
    if labels.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(labels[outside][0])} is out of bounds.")
    dtype = torch.float32 if dtype.itemsize < 4 else dtype
    labels = labels.where(valid & ~outside, 0)
    weights = valid.to(dtype) if weight is None else weight.to(dtype)[labels].where(valid, 0)
    columns, start = x.weight.shape[0], 0
    if x.group is not None:
        start = sum(split_sizes(size, x.group.size())[: x.group.rank()])
    loss = ChunkedLoss(
        labels=labels,
        valid=valid,
        weights=weights.where(~outside, torch.nan),
        class_weights=None if weight is None else weight.to(dtype)[start : start + columns],
        size=size,
        start=start,
        smoothing=label_smoothing,
        total=size if weight is None else weight.to(dtype).sum(),
        soft_cap=x.options.soft_cap,
        z_loss=x.options.z_loss,
        group=x.group,
    )
    found = loss.run(hidden, x.weight, x.bias, x.tokens_at_once, is_sum=reduction != "none")
    if reduction != "mean":
        return found.view(target.shape) if reduction == "none" else found
    count = weights.sum()
    none = count == 0  # the mean over nothing is NaN, and has the gradient 0, as in torch
    return torch.where(none, torch.nan, found / torch.where(none, 1, count))


@torch.no_grad()
def _most_likely(x: ChunkedLogits) -> Tensor:
    """Return the most likely class at every position, [...]; the first one of equals.

    **Communicates**: with sharded weights two all-gathers of a number for each token.
    """
    hidden = x.local.reshape(-1, x.local.shape[-1])
    values, places = [], []
    for part in hidden.split(x.tokens_at_once):
        logits = F.linear(part, x.weight, x.bias)  # a soft cap keeps their order
        columns = logits.shape[-1]
        value, place = (
            logits.max(-1)
            if columns
            else (logits.sum(-1) - torch.inf, part.new_zeros(len(part)).long())
        )
        values.append(value)
        places.append(place)
    value, place = torch.cat(values), torch.cat(places)
    if x.group is not None:
        with torch.DisableTorchFunctionSubclass():
            sizes = split_sizes(x.shape[x.vocab_dim], x.group.size())
        place += sum(sizes[: x.group.rank()])
        best = all_gather(value[None], 0, x.group).argmax(0, keepdim=True)
        place = all_gather(place[None], 0, x.group).gather(0, best)[0]
    return place.view(x.local.shape[:-1])


def _linear_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, options: LossOptions = _PLAIN
) -> ChunkedLogits:
    """Stand for `F.linear`, also to those who watch what functions are called."""
    if has_torch_function((hidden, weight)):
        given = (hidden, weight)
        made: ChunkedLogits = handle_torch_function(
            _linear_logits, given, hidden, weight, bias=bias, options=options
        )
        return made
    kind = hidden.device.type
    casts = hidden.dtype is not torch.float64 and torch.amp.is_autocast_available(kind)
    if casts and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return ChunkedLogits.make(hidden, weight, bias, options, weight.shape[0])


class ChunkedHead(nn.Linear):
    """A linear head whose logits are computed in chunks.

    Attributes:
        options: Soft cap, z-loss and size of chunks.
    """

    options: LossOptions = _PLAIN

    def forward(self, input: Tensor) -> ChunkedLogits:  # noqa: A002
        """Return the logits [..., V] of hidden states [..., D]."""
        return _linear_logits(input, self.weight, self.bias, self.options)


class _CatchLinear(TorchFunctionMode):
    """Lets linear maps inside give logits that are not computed."""

    def __init__(self, options: LossOptions) -> None:
        super().__init__()
        self._options = options

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear_logits(*args, **{**(kwargs or {}), "options": self._options})
        return func(*args, **(kwargs or {}))


def chunked_logits(
    hidden: Tensor, head: nn.Module, *, options: LossOptions = _PLAIN
) -> ChunkedLogits:
    """Return the logits of a head that a loss, or an `argmax`, computes in chunks.

    Args:
        hidden: [..., D].
        head: An `nn.Linear`; under tensor parallelism each rank computes with its part of the
            vocabulary if the plan divides it (``vocab_head``, ``colwise_gather_output``).
        options: Soft cap, z-loss and size of chunks.

    Raises:
        ConfigurationError: The head computes something else than one linear map.
    """
    with _CatchLinear(options), undeferred():  # by a mode inside of this one
        logits = head(hidden)
    if not isinstance(logits, ChunkedLogits):
        raise ConfigurationError(
            "LP902",
            f"head={type(head).__name__} returns {type(logits).__name__}, so its logits cannot be "
            "computed in chunks. This needs a head that is one linear layer, such as nn.Linear; "
            "with tensor parallelism its style has to be 'vocab_head', 'colwise_gather_output' or "
            "'replicated'. Use such a head, or compute all logits at once.",
        )
    return logits


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_size: int | None = None,
    return_predictions: bool = False,
) -> Any:
    """Return ``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` without whole logits.

    Loss and gradients are those of whole logits, in the precision that `F.cross_entropy` has: 16
    bits are computed in float32. A step may be on any mesh. Of a plain tensor, `F.cross_entropy` is
    what a step is seen to call, so that losses of replicas and micro-batches are weighed alike.

    Args:
        hidden: [..., D].
        weight: The head, an `nn.Linear`: under tensor parallelism its vocabulary may be sharded. Or
            a weight [V, D], such as that of a tied embedding, which a step reads whole.
        labels: [...] int64, class indices.
        bias: [V], beside a weight.
        class_weights: [V], as ``weight`` of `F.cross_entropy`.
        ignore_index: Labels of this value count nothing.
        label_smoothing: As in `F.cross_entropy`.
        z_loss: Factor of the squared log-sum-exp that is added to the loss of every token.
        soft_cap: c of ``c tanh(logits / c)``, which takes the place of the logits.
        reduction: "mean" over the labels that count, "sum" or "none". With "none" the backward
            computes the logits again, a third of the head's work more.
        chunk_size: Tokens whose logits are there at once; None: 256, or as many as take no more
            memory than the hidden states.
        return_predictions: Whether to return the most likely classes, too, which costs another
            forward of the head.

    Returns:
        A scalar, or [...] for "none"; with `return_predictions` a pair of it and [...] int64.

    Raises:
        ConfigurationError: An option is out of range, or the head is not linear.
        IndexError: A label is outside of V, on the CPU.

    **Communicates**: with a sharded vocabulary, of each chunk one all-gather of two numbers for
    each token (three with smoothing), and two of one for predictions; nothing in the backward.

    **Source**: Shoeybi et al. 1909.08053, section 3 (parallel cross-entropy); Hsu et al.
    2410.10989, section 3.2 (gradients of chunks in the forward).

    Examples:
        >>> head = nn.Linear(8, 50, bias=False)
        >>> loss = linear_cross_entropy(torch.ones(2, 5, 8), head, torch.zeros(2, 5).long())
    """
    options = LossOptions(soft_cap=soft_cap, z_loss=z_loss, chunk_size=chunk_size)
    if isinstance(weight, nn.Module):
        logits = chunked_logits(hidden, weight, options=options)
    else:
        logits = _linear_logits(hidden, weight, bias, options)
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        class_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    loss = loss.view(labels.shape) if reduction == "none" else loss
    return (loss, logits.argmax(-1)) if return_predictions else loss
