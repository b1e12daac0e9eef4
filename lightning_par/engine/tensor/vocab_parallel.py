"""Logits that stay sharded over the vocabulary, and the cross-entropy that never gathers them.

Shapes: B batch, T tokens, V vocabulary; a rank holds V/tp columns (later ranks may hold fewer).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_par.engine.annotations import Float, Int
from lightning_par.engine.collectives import (
    all_reduce,
    apply_function,
    gather_from_shards,
    refuses_second_gradient,
    shard_of_whole,
    split_sizes,
)
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.pytree import tree_map
from lightning_par.upstream.tensor import make_wrapper

__all__ = ["VocabShardedLogits", "linked_logits", "vocab_parallel_cross_entropy"]

_METADATA = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "is_sparse")


class _VocabParallelNLL(torch.autograd.Function):
    """Negative log likelihood of every token from sharded logits; the softmax shard is kept for
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        size: int,
        smoothing: float,
        group: Any,
    ) -> Tensor:
        # A rank may hold no columns, where V is small.
        columns = logits.shape[-1]
        # The maximum over the whole vocabulary, so that no exponential overflows on any rank.
        highest = logits.amax(-1) if columns else logits.new_full(target.shape, -torch.inf)
        highest = all_reduce(highest, group, "max")
        shifted = logits - highest.unsqueeze(-1)
        exponentials = shifted.exp()
        inside = (target >= start) & (target < start + columns)
        # Of labels that other ranks hold, column 0 is gathered, and masked below.
        local = torch.where(inside, target - start, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) if columns else shifted.sum(-1)
        # In one message: the sum of exponentials, and the logit of the label, which one rank has.
        parts = [exponentials.sum(-1), torch.where(inside, picked, 0)]
        if smoothing:
            parts.append(shifted.sum(-1))
        sums = all_reduce(torch.stack(parts), group)
        log_total = sums[0].log()
        loss = log_total - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_total - sums[2] / size)
        # In place: the exponentials are not needed any more, and [N, V/tp] is large.
        softmax = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, local, inside)
        ctx.smoothing, ctx.size = smoothing, size
        return loss

    @staticmethod
    @refuses_second_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, local, inside = ctx.saved_tensors
        # d loss / d logits = softmax - (1 - e) onehot - e / V.
        out = softmax - ctx.smoothing / ctx.size if ctx.smoothing else softmax.clone()
        if softmax.shape[-1]:
            hit = inside.to(out.dtype).mul_(1 - ctx.smoothing).neg_()
            out.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        return out.mul_(grad.unsqueeze(-1)), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "N V_local"],
    target: Int[Tensor, " N"],
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Float[Tensor, "*N"]:
    """Cross-entropy of logits whose vocabulary is sharded over `group`; equals `F.cross_entropy`.

    Args:
        logits: [N, V/tp], the columns of this rank. Half precision is computed in float32, as under
            autocast.
        target: [N] int64, class indices, the same on every rank. One outside of V raises on the
            CPU, as in torch, and makes the loss NaN elsewhere, without waiting for the device.
        vocab_size: V.
        group: The tensor-parallel ranks.
        ignore_index: Targets of this value count nothing.
        label_smoothing: As in `F.cross_entropy`.
        reduction: "mean" over the targets that count, "sum" or "none".

    Returns:
        A scalar, or [N] for "none"; the same on every rank.

    Raises:
        IndexError: A target is outside of V, on the CPU.

    **Communicates**: all-reduces of N maxima and of 2 N sums (3 N with smoothing) forward, nothing
    backward.

    **Source**: Shoeybi et al. 1909.08053, section 3 (parallel cross-entropy).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    start = sum(split_sizes(vocab_size, group.size())[: group.rank()])
    valid = target != ignore_index
    outside = valid & ((target < 0) | (target >= vocab_size))
    if target.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
    safe = torch.where(valid, target, 0)
    losses: Tensor = _VocabParallelNLL.apply(  # type: ignore[no-untyped-call]
        logits, safe, start, vocab_size, label_smoothing, group
    )
    # NaN in place of an error on a device, which would have to be waited for.
    losses = torch.where(outside, torch.nan, torch.where(valid, losses, 0))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


class _Link(torch.autograd.Function):
    """Makes logits the result of the tensors that they hold, for code below torch functions.

    `torch.autograd.Function.apply` calls no ``__torch_function__``: to it, logits without a graph
    are a constant, and the gradients of all that comes before them would be lost without a word.
    """

    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[[], Tensor],
        backward: Callable[[Tensor], Sequence[Tensor | None]],
        *held: Tensor | None,
    ) -> Tensor:
        ctx.back = backward
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(grad)


def linked_logits(
    kind: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    held: Sequence[Tensor | None],
    backward: Callable[[Tensor], Sequence[Tensor | None]],
) -> Any:
    """Return logits of the class `kind` that have no memory, and are the result of `held`.

    Args:
        kind: `VocabShardedLogits`, or a class derived from it.
        shape: Of the whole logits.
        dtype: Of the logits.
        held: What the logits are computed from; the first gives the device.
        backward: The gradients of `held`, from that of the whole logits.
    """
    assert held[0] is not None
    make = partial(make_wrapper, kind, shape, dtype=dtype, device=held[0].device)
    return apply_function(_Link, make, backward, *held)


class VocabShardedLogits(Tensor):
    """Logits [..., V] of which this rank holds the columns [..., V/tp].

    `F.cross_entropy` on it (also after reshaping, slicing or moving the vocabulary to dim 1) runs
    sharded. Every other operation first gathers the whole logits, so that any code that treats it
    as a tensor is right; the gather is a collective, so all tensor-parallel ranks have to run the
    same operations.
    """

    local: Tensor
    group: dist.ProcessGroup
    vocab_dim: int
    what = "are sharded over the vocabulary"
    instead = "give the head the style 'colwise_gather_output' in ParallelPlan(tensor=...)"

    @staticmethod
    def wrap(
        local: Tensor, size: int, group: dist.ProcessGroup, vocab_dim: int = -1
    ) -> "VocabShardedLogits":
        """Wrap the columns of this rank.

        Args:
            local: [..., V/tp].
            size: V.
            group: The tensor-parallel ranks.
            vocab_dim: Which dim of `local` is the vocabulary.
        """
        # Shape, dtype and device of the whole: code that asks gets what one process has.
        dim = vocab_dim % local.ndim
        shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
        back = lambda grad: (shard_of_whole(grad, dim, group),)  # noqa: E731
        made: VocabShardedLogits
        made = linked_logits(VocabShardedLogits, shape, local.dtype, [local], back)
        made.local, made.group, made.vocab_dim = local, group, dim
        return made

    def like(self, local: Tensor, vocab_dim: int = -1) -> "VocabShardedLogits":
        """Return the same logits in another shape or dtype, given by what this rank holds of them.

        Args:
            local: What takes the place of `self.local`.
            vocab_dim: Which dim of `local` is the vocabulary.
        """
        with torch.DisableTorchFunctionSubclass():
            size = self.shape[self.vocab_dim]
        return VocabShardedLogits.wrap(local, size, self.group, vocab_dim)

    def full(self) -> Tensor:
        """Return the whole logits as a plain tensor; differentiable.

        **Communicates**: one all-gather over the tensor-parallel ranks.
        """
        return gather_from_shards(self.local, self.vocab_dim, self.group, self.size(self.vocab_dim))

    def answer(
        self, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what a function of these logits gives, or NotImplemented if it takes the whole.

        Args:
            func: A function of torch.
            rest: Its other positional arguments.
            kwargs: Its keyword arguments.
        """
        return _answer_from_shard(func, self, rest, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from the shard where that is exact, else gather first."""
        kwargs = dict(kwargs or {})
        if not args and isinstance(kwargs.get("input"), VocabShardedLogits):
            args = (kwargs.pop("input"),)
        first = args[0] if args else None
        # Operations whose first argument are the logits may be answered from the shard.
        if isinstance(first, VocabShardedLogits):
            _refuse_change(func, first)
            answer = first.answer(func, tuple(args[1:]), kwargs)
            if answer is not NotImplemented:
                return answer
        # Everything else is right on the whole logits: gathered by a collective, on all ranks
        # alike.
        plain = tree_map(_gathered, (tuple(args), dict(kwargs)))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gather first; only code that disabled torch functions on purpose comes here."""
        plain = tree_map(_gathered, (tuple(args), dict(kwargs or {})))
        return func(*plain[0], **plain[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            return f"VocabShardedLogits(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"


def _refuse_change(func: Callable[..., Any], logits: VocabShardedLogits) -> None:
    """Refuse what would change the gathered copy and leave the logits as they were."""
    name = getattr(func, "__name__", "")
    # Names of operations in place end with one underscore; `__getitem__` and the like with two.
    if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
        raise ConfigurationError(
            "LP317",
            f"{name} is an in-place operation, which is not supported on logits that "
            f"{logits.what}. Use the operation that returns a new tensor (masked_fill instead of "
            f"masked_fill_, torch.where instead of an assignment), or {logits.instead}.",
        )


def _gathered(value: Any) -> Any:
    return value.full() if isinstance(value, VocabShardedLogits) else value


def _answer_from_shard(
    func: Callable[..., Any],
    x: VocabShardedLogits,
    rest: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _answer_property(func, x)
    with torch.DisableTorchFunctionSubclass():
        if func in (Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__):
            return func(x, *rest, **kwargs)
        if func in (Tensor.is_floating_point, torch.is_floating_point):
            return True
        if func in (Tensor.is_inference, torch.is_inference):
            return func(x.local)
        shape, dim, size = x.shape, x.vocab_dim, x.shape[x.vocab_dim]
    # A hook on the logits sees the gradient of this rank's columns.
    if func is Tensor.register_hook or func is Tensor.__repr__:
        return func(x.local, *rest) if func is Tensor.register_hook else x.__repr__()
    if func is F.cross_entropy:
        return _cross_entropy(x, size, *rest, **kwargs)
    if func in (
        Tensor.float,
        Tensor.double,
        Tensor.contiguous,
        Tensor.to,
        Tensor.clone,
        # Element by element: the shard's result is the shard of the result.
        Tensor.detach,
    ):
        return x.like(func(x.local, *rest, **kwargs), dim)
    if kwargs or dim != len(shape) - 1:
        return NotImplemented
    if func is Tensor.__getitem__ and _keeps_last(rest[0], len(shape)):
        return x.like(x.local[rest[0]])
    # [B, T, V] to [B, V, T], as F.cross_entropy wants the classes in dim 1.
    swaps = func in (Tensor.transpose, torch.transpose) and len(shape) == 3
    if swaps and sorted(d % 3 for d in rest) == [1, 2]:
        return x.like(x.local.transpose(1, 2), 1)
    leading = _new_leading_shape(func, shape, rest)
    if leading is None:
        return NotImplemented
    return x.like(x.local.reshape(*leading, x.local.shape[-1]))


def _answer_property(func: Any, x: VocabShardedLogits) -> Any:
    name = getattr(func.__self__, "__name__", "")
    if name in ("requires_grad", "grad_fn", "is_leaf"):
        return func(x.local)
    if name in _METADATA:
        with torch.DisableTorchFunctionSubclass():
            return func(x)
    return NotImplemented


def _keeps_last(index: Any, ndim: int) -> bool:
    """Whether `x[index]` leaves the last dim whole and last."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(p, bool) or not isinstance(p, int | slice | EllipsisType) for p in parts):
        return False
    if len(parts) - (Ellipsis in parts) < ndim and (Ellipsis not in parts or parts[-1] is Ellipsis):
        return True
    return parts[-1] == slice(None) or (parts[-1] is Ellipsis and parts[-2] == slice(None))


def _new_leading_shape(
    func: Callable[..., Any], shape: Sequence[int], rest: tuple[Any, ...]
) -> list[int] | None:
    """Return the dims before the vocabulary after a reshape that keeps it last, or None."""
    if func in (Tensor.view, Tensor.reshape, torch.reshape):
        wanted = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
        if not wanted or not all(isinstance(n, int) for n in wanted):
            return None
        # On meta: torch resolves a -1, also where this rank's shard is empty.
        whole = torch.empty(shape, device="meta").reshape(*wanted).shape
        return list(whole[:-1]) if whole[-1] == shape[-1] else None
    if func in (Tensor.flatten, torch.flatten) and rest:
        start, end = rest[0] % len(shape), (rest[1] if len(rest) > 1 else -1) % len(shape)
        # Only if the vocabulary is not among the flattened dims.
        if end < len(shape) - 1:
            return [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 : -1]]
    return None


def _cross_entropy(
    x: VocabShardedLogits,
    size: int,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` with the vocabulary where torch has the classes: dim 1, or dim 0 without a
    batch.
    """
    classes = 0 if x.local.ndim == 1 else 1
    # Class weights and soft labels need the whole row: they are gathered.
    plain = weight is None and size_average is None and reduce is None
    plain = plain and reduction in ("mean", "sum", "none")
    if not plain or target.is_floating_point() or x.vocab_dim != classes:
        return NotImplemented
    local = x.local.movedim(classes, -1)
    loss = vocab_parallel_cross_entropy(
        local.reshape(math.prod(local.shape[:-1]), local.shape[-1]),
        target.reshape(-1),
        vocab_size=size,
        group=x.group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.view(target.shape) if reduction == "none" else loss
