"""Methods of gradient compression: the mean of a bucket of gradients in fewer bytes.

=========  =======================================  ===================================
method     what is sent                             bytes sent for 4 n bytes of float32
=========  =======================================  ===================================
fp16/bf16  rounded gradients                        half of an all-reduce
int8       8 bits an entry, a scale for every 256   about a quarter of an all-reduce
topk       the k largest entries and their places   8 k (N - 1)
powersgd   P [rows, r] and Q [columns, r]           an all-reduce of r (rows + columns)
=========  =======================================  ===================================

N replicas; an all-reduce sends 2 (N - 1)/N of what it reduces. Rounding to 16 bits is done by
torch's communication hooks of `DistributedDataParallel`.

Note [Error feedback]: what a rank did not send of a gradient, it adds to the next one, so that over
the steps everything arrives. Under "int8" the mean is rounded a second time, by the rank that made
this part of it, which remembers that error as well. What is owed of a gradient that no rank has in
a step waits, because its parameter takes nothing in that step. (The hook of torch for PowerSGD
knows of no such gradient, and stays at 0 once a matrix was 0.)

Note [Equal bits]: every rank computes the mean from the same bytes in the same order, so that
replicas stay equal bit for bit.

**Source**: Vogels et al. 1905.13727, algorithms 1 and 2 (PowerSGD); Stich et al. 1809.07599 (top-k
with memory); Karimireddy et al. 1901.09847 (error feedback); Tang et al. 2102.02888, section 3
(errors of both roundings).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_par.engine.collectives import all_gather
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.data.gradient_reduction import sum_together

__all__ = ["Compressor", "GradientBucket", "choose_compressor"]

_BLOCK = 256
"""Entries that share a scale."""
_LARGEST = 127


class GradientBucket:
    """Gradients in one buffer; torch's communication hooks take it for a `dist.GradBucket`.

    Args:
        number: Index of the bucket, the same in every step.
        gradients: Gradients of one dtype.
        absent: Indices of those that no replica has in this step; they are 0.
    """

    def __init__(
        self, number: int, gradients: Sequence[Tensor], absent: Collection[int] = ()
    ) -> None:
        self.number = number
        # A copy, which `reduce` overwrites; the caller puts the means back.
        self._buffer = torch.cat([g.reshape(-1) for g in gradients])
        parts = self._buffer.split([g.numel() for g in gradients])
        pairs = zip(parts, gradients, strict=True)
        # torch's hooks read the number of rows, which a scalar lacks.
        self._gradients = [part.view(g.shape if g.ndim else (1,)) for part, g in pairs]
        ends = list(accumulate(part.numel() for part in parts))
        self.absent = [slice(ends[i] - parts[i].numel(), ends[i]) for i in sorted(absent)]

    def buffer(self) -> Tensor:
        """Return all entries, [n]."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer; a scalar has one row."""
        return self._gradients


class Compressor(Protocol):
    """Replaces gradients by their mean over the replicas, or an approximation of it."""

    def reduce(self, bucket: GradientBucket) -> None:
        """Write the mean over the buffer; every rank of the group has to call."""

    def rescale(self, factor: float) -> None:
        """Multiply the errors kept, because gradients are scaled by `factor` from now on."""

    def state(self) -> dict[str, Any]:
        """Return the state that continues bit for bit; tensors, not copied."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


def choose_compressor(options: GradientCompression, group: dist.ProcessGroup) -> Compressor:
    """Return a new compressor.

    Args:
        options: Options of compression.
        group: Process group of the replicas.
    """
    if options.method == "powersgd":
        return _LowRank(group, options.rank)
    if options.method == "topk":
        return _Largest(group, options.density)
    if options.method == "int8":
        return _EightBits(group)
    return _Rounded(group, options.method)


class _Rounded:
    """Sums in 16 bits."""

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        self._group, self._hook = group, hooks[method]

    def reduce(self, bucket: GradientBucket) -> None:
        self._hook(self._group, bucket).wait()

    def rescale(self, factor: float) -> None:
        """Nothing is remembered."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is remembered."""


class _ErrorFeedback:
    """Adds to every gradient the error of the ones before; see Note [Error feedback]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._owed: dict[int, Tensor] = {}

    @torch.no_grad()
    def reduce(self, bucket: GradientBucket) -> None:
        # flat: [n] gradients of this step; owed: [n] in float32 or wider, as it collects small
        # errors.
        flat, owed = bucket.buffer(), self._owed.get(bucket.number)
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        # In place: `owed` is not needed any more, and becomes what is owed next.
        total = flat.to(wide, copy=True) if owed is None else owed.add_(flat)
        # The parameter of an absent gradient takes nothing in this step, so nothing of it may be
        # sent.
        kept = _set_aside(total, bucket.absent)
        flat.copy_(self._exchange(bucket, total))
        _put_back(total, kept)
        self._owed[bucket.number] = total

    def _exchange(self, bucket: GradientBucket, total: Tensor) -> Tensor:
        """Return the mean, [n]; leave in `total`, [n], what was not sent.

        Args:
            bucket: Says which entries are whose.
            total: Gradients, and what is owed of earlier ones.
        """
        raise NotImplementedError

    def rescale(self, factor: float) -> None:
        for owed in self._owed.values():
            owed.mul_(factor)

    def state(self) -> dict[str, Any]:
        return {"owed": dict(self._owed)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._owed = dict(state["owed"])


def _set_aside(values: Tensor, places: Sequence[slice]) -> list[tuple[slice, Tensor]]:
    kept = [(place, values[place].clone()) for place in places]
    for place in places:
        values[place] = 0
    return kept


def _put_back(values: Tensor, kept: Sequence[tuple[slice, Tensor]]) -> None:
    for place, part in kept:
        values[place] += part


class _LowRank(_ErrorFeedback):
    """Sends matrices as products of narrow ones.

    M [rows, columns] is projected on r orthonormal columns, P = orthonormal(sum of M Q), and what
    arrives is P R^T with R = the mean of M^T P. Q is the R of the step before, made orthonormal. A
    matrix that would not become half as small travels whole.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(group)
        self._rank = rank
        self._bases: dict[int, list[Tensor]] = {}

    # matrix: [rows, columns]; basis Q: [columns, r]; left P: [rows, r]; right R: [columns, r].
    def _exchange(self, bucket: GradientBucket, total: Tensor) -> Tensor:
        mean = torch.empty_like(total)
        sizes = [g.numel() for g in bucket.gradients()]
        split = [tensor.split(sizes) for tensor in (total, mean)]
        narrowed: list[tuple[Tensor, Tensor]] = []
        whole: list[tuple[Tensor, Tensor]] = []
        for part, arrives, gradient in zip(*split, bucket.gradients(), strict=True):
            matrix, target = (each.view(len(gradient), -1) for each in (part, arrives))
            # Otherwise the two factors would not save half of the bytes.
            narrow = 2 * self._rank * sum(matrix.shape) < matrix.numel()
            (narrowed if narrow else whole).append((matrix, target))
        bases = self._bases.get(bucket.number)
        if bases is None:
            bases = [self._start(matrix, i) for i, (matrix, _) in enumerate(narrowed)]
        lefts = [matrix @ basis for (matrix, _), basis in zip(narrowed, bases, strict=True)]
        sums = sum_together([*lefts, *(matrix for matrix, _ in whole)], self._group)
        # From equal sums QR gives equal bits, so that all ranks have the same P without a
        # message.
        lefts = [torch.linalg.qr(left).Q for left in sums[: len(lefts)]]
        pairs = zip(narrowed, lefts, strict=True)
        # R is linear in M: the mean of the R of all ranks is the R of the mean gradient.
        parts = [matrix.T @ left / self._group.size() for (matrix, _), left in pairs]
        rights = sum_together(parts, self._group)
        for (matrix, target), left, right in zip(narrowed, lefts, rights, strict=True):
            torch.matmul(left, right.T, out=target)
            # What this rank's gradient has beyond the product that arrived is owed.
            matrix -= target
        for (matrix, target), found in zip(whole, sums[len(lefts) :], strict=True):
            torch.div(found, self._group.size(), out=target)
            matrix.zero_()
        # Warm start: the R of this step is a power iteration for the
        # next.
        self._bases[bucket.number] = [torch.linalg.qr(right).Q for right in rights]
        return mean

    def _start(self, matrix: Tensor, place: int) -> Tensor:
        """Return a first basis, the same on every rank."""
        # Its own generator, on the CPU: the same on every rank, and the user's draws stay.
        generator = torch.Generator().manual_seed(place)
        shape = matrix.shape[1], self._rank
        drawn = torch.randn(shape, generator=generator, dtype=matrix.dtype)
        basis: Tensor = torch.linalg.qr(drawn.to(matrix.device)).Q
        return basis

    def state(self) -> dict[str, Any]:
        return {**super().state(), "bases": dict(self._bases)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._bases = dict(state["bases"])


class _Largest(_ErrorFeedback):
    """Sends the entries with the largest absolute values."""

    def __init__(self, group: dist.ProcessGroup, density: float) -> None:
        super().__init__(group)
        self._density = density

    def _exchange(self, bucket: GradientBucket, total: Tensor) -> Tensor:
        count = math.ceil(self._density * total.numel())
        places = total.abs().topk(count, sorted=False).indices
        # int32 places: a bucket is far below 2**31 entries, and places are half of the message.
        message = _as_bytes(total[places], places.int())
        total[places] = 0
        mean = torch.zeros_like(total)
        # Added rank by rank in the same order everywhere: see Note [Equal bits].
        for row in all_gather(message[None], 0, self._group):
            values, at = row.split([count * total.element_size(), count * 4])
            # Copies, as a view of a wider dtype has to begin at a multiple of its size.
            mean.index_add_(0, at.clone().view(torch.int32), values.clone().view(total.dtype))
        return mean.div_(self._group.size())


class _EightBits(_ErrorFeedback):
    """Sends every entry in 8 bits: to the rank that makes this part of the mean, and from it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._made: dict[int, Tensor] = {}

    def _exchange(self, bucket: GradientBucket, total: Tensor) -> Tensor:
        ranks, entries = self._group.size(), total.numel()
        # Entries of the part of one rank, in whole blocks; all parts have the same size, by
        # padding.
        size = -(-entries // (ranks * _BLOCK)) * _BLOCK
        padded = F.pad(total, (0, ranks * size - entries)).view(ranks, size)
        message = _to_eight_bits(padded)
        # Error of the first rounding: what arrives of this rank is the rounded value.
        total -= _from_eight_bits(message, total.dtype).flatten()[:entries]
        parts = torch.empty_like(message)
        dist.all_to_all_single(parts, message, group=self._group)
        mean = _from_eight_bits(parts, total.dtype).sum(0, keepdim=True).div_(ranks)
        if bucket.number in self._made:
            mean += self._made[bucket.number]
        # This rank makes the mean of the entries [first, first + size), and keeps its rounding
        # error.
        first = self._group.rank() * size
        kept = _set_aside(mean[0], _within(bucket.absent, first, first + size))
        message = _to_eight_bits(mean)
        mean -= _from_eight_bits(message, total.dtype)
        _put_back(mean[0], kept)
        self._made[bucket.number] = mean
        means = all_gather(message, 0, self._group)
        # Every rank decodes the same bytes, also of the part that it made itself.
        return _from_eight_bits(means, total.dtype).flatten()[:entries]

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        for owed in self._made.values():
            owed.mul_(factor)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "made": dict(self._made)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._made = dict(state["made"])


def _within(places: Sequence[slice], low: int, high: int) -> list[slice]:
    """Return the parts of the places that are from `low` to `high`, counted from there."""
    cut = [(max(place.start, low) - low, min(place.stop, high) - low) for place in places]
    return [slice(start, stop) for start, stop in cut if start < stop]


def _to_eight_bits(rows: Tensor) -> Tensor:
    """Return [r, n] entries as [r, n + 4 n/256] bytes: whole numbers, then their scales."""
    blocks = rows.view(-1, _BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / _LARGEST).float()
    # A block of zeros would be divided by a scale of 0.
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    numbers = (blocks / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    parts = [part.view(torch.uint8).view(len(rows), -1) for part in (numbers, scales)]
    return torch.cat(parts, 1)


def _from_eight_bits(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `_to_eight_bits` wrote, as [r, n] entries."""
    count = message.shape[1] // (_BLOCK + torch.float32.itemsize)
    sizes = [count * _BLOCK, count * torch.float32.itemsize]
    numbers, scales = (part.contiguous() for part in message.split(sizes, 1))
    blocks = numbers.view(torch.int8).view(-1, _BLOCK).to(dtype)
    blocks *= scales.view(torch.float32).view(-1, 1)
    rows: Tensor = blocks.view(len(message), -1)
    return rows


def _as_bytes(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])
