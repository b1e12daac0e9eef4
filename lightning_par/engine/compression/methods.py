"""How the replicas agree on the mean of a bucket of gradients in fewer bytes.

=========  =======================================  ===================================
method     what travels                             bytes sent for 4 n bytes of float32
=========  =======================================  ===================================
fp16/bf16  rounded gradients                        half of an all-reduce
int8       8 bits an entry, a scale for every 256   about a quarter of an all-reduce
topk       the k largest entries and their places   8 k (N - 1)
powersgd   P [rows, r] and Q [columns, r]           an all-reduce of r (rows + columns)
=========  =======================================  ===================================

N replicas; an all-reduce sends 2 (N - 1)/N of what it reduces. Rounding to 16 bits and PowerSGD are
torch's communication hooks of `DistributedDataParallel`.

Note [Error feedback]: what a rank did not send of a gradient, it adds to the next one, so that over
the steps everything arrives. Under "int8" the mean is rounded a second time, by the rank that made
this part of it, which remembers that error as well.

Note [Equal bits]: every rank computes the mean from the same bytes in the same order, so that
replicas stay equal bit for bit.

**Source**: Vogels et al. 1905.13727 (PowerSGD); Stich et al. 1809.07599 (top-k with memory);
Karimireddy et al. 1901.09847 (error feedback); Tang et al. 2102.02888, section 3 (errors of both
roundings).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook, PowerSGDState

from lightning_par.engine.collectives import all_gather
from lightning_par.engine.compression.options import GradientCompression

__all__ = ["Compressor", "GradientBucket", "choose_compressor"]

_BLOCK = 256
"""Entries that share a scale."""
_LARGEST = 127


class GradientBucket:
    """Gradients side by side; what torch's communication hooks see of a `dist.GradBucket`.

    Args:
        number: From 0; the same one in every step.
        gradients: In one dtype.
        is_last: Whether no other one follows in this step.
    """

    def __init__(self, number: int, gradients: Sequence[Tensor], *, is_last: bool) -> None:
        self._number, self._is_last = number, is_last
        self._buffer = torch.cat([g.reshape(-1) for g in gradients])
        parts = self._buffer.split([g.numel() for g in gradients])
        pairs = zip(parts, gradients, strict=True)
        self._gradients = [part.view(g.shape if g.ndim else (1,)) for part, g in pairs]

    def index(self) -> int:
        """Return the number."""
        return self._number

    def buffer(self) -> Tensor:
        """Return all entries, [n]."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer; a scalar has one row."""
        return self._gradients

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this step."""
        return self._is_last


class Compressor(Protocol):
    """Replaces gradients by their mean over the replicas, or by something near it."""

    def reduce(self, bucket: GradientBucket) -> None:
        """Write the mean over the buffer; every rank of the group has to call."""

    def rescale(self, factor: float) -> None:
        """Multiply what is remembered, as gradients are from now on."""

    def state(self) -> dict[str, Any]:
        """Return what has to be known to go on; tensors, not copied."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


def choose_compressor(options: GradientCompression, group: dist.ProcessGroup) -> Compressor:
    """Return a new compressor.

    Args:
        options: Which.
        group: The replicas.
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


class _LowRank:
    """Sends matrices as products of narrow ones; torch's hook remembers what that leaves out."""

    _PARTS = ("error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._state = PowerSGDState(
            group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,
        )
        # The hook leaves the first two steps to `DistributedDataParallel`, which then moves its
        # buckets. Ours stay.
        self._state.iter = 2

    def reduce(self, bucket: GradientBucket) -> None:
        powerSGD_hook(self._state, bucket).wait()

    def rescale(self, factor: float) -> None:
        for error in self._state.error_dict.values():
            error.mul_(factor)

    def state(self) -> dict[str, Any]:
        return {name: dict(getattr(self._state, name)) for name in self._PARTS}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in self._PARTS:
            setattr(self._state, name, dict(state[name]))


class _Remembering:
    """Adds to every gradient what was left out of the ones before; see Note [Error feedback]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._owed: dict[int, Tensor] = {}

    @torch.no_grad()
    def reduce(self, bucket: GradientBucket) -> None:
        flat, number = bucket.buffer(), bucket.index()
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        owed = self._owed.get(number)
        total = flat.to(wide, copy=True) if owed is None else owed.add_(flat)
        flat.copy_(self._exchange(number, total))
        self._owed[number] = total

    def _exchange(self, number: int, total: Tensor) -> Tensor:
        """Return the mean, [n]; leave in `total`, [n], what was not sent."""
        raise NotImplementedError

    def rescale(self, factor: float) -> None:
        for owed in self._owed.values():
            owed.mul_(factor)

    def state(self) -> dict[str, Any]:
        return {"owed": dict(self._owed)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._owed = dict(state["owed"])


class _Largest(_Remembering):
    """Sends the entries with the largest absolute values."""

    def __init__(self, group: dist.ProcessGroup, density: float) -> None:
        super().__init__(group)
        self._density = density

    def _exchange(self, number: int, total: Tensor) -> Tensor:
        count = math.ceil(self._density * total.numel())
        places = total.abs().topk(count, sorted=False).indices
        message = _as_bytes(total[places], places.int())
        total[places] = 0
        mean = torch.zeros_like(total)
        for row in all_gather(message[None], 0, self._group):
            values, at = row.split([count * total.element_size(), count * 4])
            # Copies, as a view of a wider dtype has to begin at a multiple of its size.
            mean.index_add_(0, at.clone().view(torch.int32), values.clone().view(total.dtype))
        return mean.div_(self._group.size())


class _EightBits(_Remembering):
    """Sends every entry in 8 bits: to the rank that makes this part of the mean, and from it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._made: dict[int, Tensor] = {}

    def _exchange(self, number: int, total: Tensor) -> Tensor:
        ranks, entries = self._group.size(), total.numel()
        size = -(-entries // (ranks * _BLOCK)) * _BLOCK
        padded = F.pad(total, (0, ranks * size - entries)).view(ranks, size)
        message = _to_eight_bits(padded)
        total -= _from_eight_bits(message, total.dtype).flatten()[:entries]
        parts = torch.empty_like(message)
        dist.all_to_all_single(parts, message, group=self._group)
        mean = _from_eight_bits(parts, total.dtype).sum(0, keepdim=True).div_(ranks)
        if number in self._made:
            mean += self._made[number]
        message = _to_eight_bits(mean)
        self._made[number] = mean - _from_eight_bits(message, total.dtype)
        means = all_gather(message, 0, self._group)
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


def _to_eight_bits(rows: Tensor) -> Tensor:
    """Return [r, n] entries as [r, n + n/64] bytes: whole numbers, then their scales."""
    blocks = rows.view(-1, _BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / _LARGEST).float()
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    numbers = (blocks / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    parts = [part.view(torch.uint8).view(len(rows), -1) for part in (numbers, scales)]
    return torch.cat(parts, 1)


def _from_eight_bits(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `_to_eight_bits` wrote, as [r, n] entries."""
    entries = message.shape[1] * _BLOCK // (_BLOCK + 4)
    numbers, scales = (part.contiguous() for part in message.split([entries, entries // 64], 1))
    blocks = numbers.view(torch.int8).view(-1, _BLOCK).to(dtype)
    blocks *= scales.view(torch.float32).view(-1, 1)
    rows: Tensor = blocks.view(len(message), -1)
    return rows


def _as_bytes(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])
