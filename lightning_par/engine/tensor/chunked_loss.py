"""Cross-entropy of a linear head, of whose logits only a chunk of tokens is there at a time.

Shapes: N tokens, D model dim, V vocabulary; a rank holds V/tp rows of the head's weight.

Note [Gradients in the forward]: the gradients of a sum of losses do not depend on what comes later,
but for one factor. So the forward computes them of every chunk while its logits are there, with the
three products that whole logits take, and keeps [N, D] and [V/tp, D] in the place of [N, V/tp]. The
factor, which holds the scale of the loss and the number of labels, is multiplied in the backward:
in 16 bits the gradient of a logit would vanish with it. Losses of single tokens have factors of
their own: there the backward computes the logits of every chunk a second time.

Note [One message for each chunk]: the gradient of a logit takes the log-sum-exp of all ranks, so
that ranks have to meet in every chunk. One all-gather of two numbers for each token, the
log-sum-exp of a rank and the logit of the label, takes the place of a maximum and a sum, one after
the other. Up to tp 3 it moves fewer bytes, too; beyond, both are little beside the D numbers of
each token that enter the head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.engine.collectives import all_gather, apply_function, refuses_second_gradient

__all__ = ["ChunkedLoss"]

_ROWS = 8192
"""Of the weight, whose gradient of a chunk is a tensor at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedLoss:
    """The loss of N tokens.

    Attributes:
        labels: [N] int64; any index where the label is ignored.
        valid: [N] bool: whether the label is not ignored.
        weights: [N]: class weight of the label, 0 if it is ignored, NaN if it is outside of V.
        class_weights: [V/tp], those of this rank's columns; None: all are 1.
        size: V.
        start: First column of this rank.
        smoothing: As in `F.cross_entropy`.
        total: Sum of the class weights of all V.
        soft_cap: c of ``c tanh(logits / c)``, which takes the place of the logits, or None.
        z_loss: Factor of the squared log-sum-exp, which every token adds to its loss.
        group: The tensor-parallel ranks, or None.
    """

    labels: Tensor
    valid: Tensor
    weights: Tensor
    class_weights: Tensor | None
    size: int
    start: int
    smoothing: float
    total: float | Tensor
    soft_cap: float | None
    z_loss: float
    group: Any

    def run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, *, is_sum: bool
    ) -> Tensor:
        """Return the losses [N], or their sum.

        Args:
            hidden: [N, D].
            weight: [V/tp, D].
            bias: [V/tp], or None.
            chunk: Tokens whose logits are there at once.
            is_sum: Whether to return the sum.
        """
        needs = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
        keeps = is_sum and needs and torch.is_grad_enabled()
        found = apply_function(_LinearLoss, hidden, weight, bias, self, chunk, keeps)
        return found.sum() if is_sum and not keeps else found


class _Chunk:
    """The logits of some tokens, which become their exponentials, and these the gradient.

    Args:
        loss: That of all tokens.
        rows: Which tokens.
        hidden: [N, D].
        weight: [V/tp, D].
        bias: [V/tp], or None.
    """

    def __init__(
        self, loss: ChunkedLoss, rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._loss, self._weights, self._valid = loss, loss.weights[rows], loss.valid[rows]
        logits = F.linear(hidden[rows], weight, bias).to(loss.weights.dtype)
        self._shift: Tensor | None = None
        self._slope: Tensor | None = None
        if loss.soft_cap is not None:
            bounded = torch.tanh(logits / loss.soft_cap)
            logits, self._slope = bounded * loss.soft_cap, 1 - bounded.square()
        self._values = logits
        local = loss.labels[rows] - loss.start
        self._inside = (local >= 0) & (local < logits.shape[-1])
        self._labels = local.where(self._inside, 0)[:, None]

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the losses of the tokens, and the log-sum-exp of their logits.

        **Communicates**: one all-gather of two numbers for each token, three with smoothing.
        """
        loss, logits, s = self._loss, self._values, self._loss.smoothing
        if logits.shape[-1]:
            highest, picked = logits.amax(-1), logits.gather(-1, self._labels)[:, 0]
        else:
            highest, picked = logits.sum(-1) - torch.inf, logits.sum(-1)
        parts = [picked.where(self._inside, 0)]
        if s:
            parts.append(self._over_classes(logits))
        parts.insert(0, highest + self._exponentiate(highest).sum(-1).log())
        if loss.group is not None:
            ranks = all_gather(torch.stack(parts)[None], 0, loss.group).unbind(1)
            parts = [torch.logsumexp(ranks[0], 0), *(part.sum(0) for part in ranks[1:])]
        lse, picked, *sums = parts
        found = self._weights * ((1 - s) * (lse - picked) + loss.z_loss * lse.square())
        if s:
            found += s / loss.size * (loss.total * lse - sums[0])
        return found.where(self._valid, 0), lse

    def gradient(self, lse: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return the gradient of the sum of the losses, each times a factor, for the product that
        made the logits.

        Args:
            lse: What `losses` gave, of this chunk or of an equal one.
            factor: [n]; None: 1.
        """
        loss, s = self._loss, self._loss.smoothing
        if self._shift is None:
            self._exponentiate(lse)
        assert self._shift is not None
        counted = self._valid.to(lse.dtype) if factor is None else factor.where(self._valid, 0)
        weights, spread = self._weights * counted, counted * (s / loss.size)
        of_sum = weights * (1 - s + 2 * loss.z_loss * lse) + spread * loss.total
        grad = self._values.mul_((of_sum * (self._shift - lse).exp())[:, None])
        if s:
            each = loss.class_weights
            grad.sub_(spread[:, None] if each is None else spread[:, None] * each)
        if grad.shape[-1]:
            grad.scatter_add_(-1, self._labels, ((s - 1) * weights).where(self._inside, 0)[:, None])
        return grad if self._slope is None else grad.mul_(self._slope)

    def _over_classes(self, logits: Tensor) -> Tensor:
        each = self._loss.class_weights
        return logits.sum(-1) if each is None else logits @ each

    def _exponentiate(self, shift: Tensor) -> Tensor:
        self._shift = shift
        return self._values.sub_(shift[:, None]).exp_()


class _Sums:
    """The gradients of a sum of losses for what made the logits, in float32 or better; None where
    none is needed.
    """

    def __init__(
        self, dtype: torch.dtype, given: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> None:
        self._given = given
        self.found = [
            torch.zeros_like(tensor, dtype=dtype) if need and tensor is not None else None
            for tensor, need in zip(given, needed, strict=True)
        ]

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add what the gradient of logits [n, V/tp] gives."""
        hidden, weight, _ = self._given
        assert hidden is not None
        assert weight is not None
        of_hidden, of_weight, of_bias = self.found
        if of_hidden is not None:
            of_hidden[rows] = _product(grad, weight)
        if of_weight is not None and not _widens(grad, hidden):
            of_weight.addmm_(grad.t(), hidden[rows].to(grad.dtype))
        elif of_weight is not None:  # in parts, as each is a tensor of its own
            for total, columns in zip(of_weight.split(_ROWS), grad.split(_ROWS, 1), strict=True):
                total += _product(columns.t(), hidden[rows])
        if of_bias is not None:
            of_bias += grad.sum(0)


def _widens(grad: Tensor, factor: Tensor) -> bool:
    """Whether the device has a product of tensors of 16 bits in 32."""
    return factor.is_cuda and factor.dtype.itemsize < grad.dtype.itemsize == 4


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """Return a matrix product in the dtype of the first: one of 16 bits is not rounded to these."""
    if _widens(grad, factor):
        return torch.mm(grad.to(factor.dtype), factor, out_dtype=grad.dtype)
    return grad @ factor.to(grad.dtype)


class _LinearLoss(torch.autograd.Function):
    """The sum of the losses of N tokens, or each of them; see Note [Gradients in the forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: ChunkedLoss,
        chunk: int,
        keeps_gradients: bool,
    ) -> Tensor:
        losses = loss.weights.new_empty(len(hidden))
        lse = torch.empty_like(losses)
        given, needed = [hidden, weight, bias], ctx.needs_input_grad[:3]
        sums = _Sums(losses.dtype, given, needed) if keeps_gradients else None
        for rows in _chunks(len(hidden), chunk):
            made = _Chunk(loss, rows, hidden, weight, bias)
            losses[rows], lse[rows] = made.losses()
            if sums is not None:
                sums.add(rows, made.gradient(lse[rows]))
            del made  # before the next one is there
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.keeps_gradients, ctx.loss, ctx.chunk = keeps_gradients, loss, chunk
        ctx.save_for_backward(*([*given, lse] if sums is None else sums.found))
        return losses if sums is None else losses.sum()

    @staticmethod
    @refuses_second_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.keeps_gradients:
            made = map(partial(_scaled, grad), ctx.saved_tensors, ctx.dtypes)
            return (*made, None, None, None)
        *given, lse = ctx.saved_tensors
        sums = _Sums(lse.dtype, given, ctx.needs_input_grad[:3])
        for rows in _chunks(len(lse), ctx.chunk):
            chunk = _Chunk(ctx.loss, rows, *given)
            sums.add(rows, chunk.gradient(lse[rows], grad[rows]))
            del chunk
        found = zip(sums.found, ctx.dtypes, strict=True)
        return (*(x if x is None else x.to(dtype) for x, dtype in found), None, None, None)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def _scaled(factor: Tensor, sums: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return sums times a factor, rounded once to a dtype."""
    if sums is None:
        return None
    return torch.mul(sums, factor, out=torch.empty_like(sums, dtype=dtype))
