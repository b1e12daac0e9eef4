"""Stochastic rounding of numbers to fewer bits, which does not depend on how tensors are divided.

Note [Stochastic rounding]: moments of optimizers in few bits are rounded up or down at random,
which keeps their expectation: with b2 = 0.999 a step changes v by less than its last digit, so that
rounding to the nearest would leave v where it is. The random bits are a hash of the entry's index
and the step, hence the same in every run, in every kernel, and however a tensor is sharded.

**Source**: Wellons, Prospecting for hash functions (the integer finalizer "lowbias32").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NEAREST", "cut_bits", "entry_index", "mixed", "random_bits", "round_to_bfloat16"]

_MASK = 0xFFFFFFFF
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


def mixed(number: int) -> int:
    """Return a 32-bit hash of `number`; every bit of it depends on every bit of the input."""
    number &= _MASK
    for shift, factor in _ROUNDS:
        number = ((number ^ (number >> shift)) * factor) & _MASK
    return number ^ (number >> 16)


def _signed(number: int) -> int:
    """Return the int32 that has the bits of an unsigned number."""
    return number - 2**32 if number >= 2**31 else number


NEAREST = _signed(0x80008000)
"""In the place of random bits: rounds to the nearest."""


def entry_index(
    shape: Sequence[int], low: Sequence[int], whole: Sequence[int], device: torch.device
) -> Tensor:
    """Return the index that every entry of a part of a tensor has in the flat whole tensor.

    Args:
        shape: Of the part.
        low: Index of its first entry in every dim.
        whole: Shape of the whole tensor.
        device: Where the indices are made.

    Returns:
        The lowest 32 bits of each index, int32, of the shape of the part.
    """
    index, stride = torch.zeros((), dtype=torch.int32, device=device), 1
    for dim, (size, first, length) in enumerate(reversed([*zip(shape, low, whole, strict=True)])):
        along = torch.arange(first, first + size, device=device) * stride
        index = along.to(torch.int32).view(-1, *[1] * dim) + index
        stride *= length
    return index


def random_bits(index: Tensor, seed: int) -> Tensor:
    """Return `mixed(index ^ seed)` entry by entry.

    Args:
        index: int32.
        seed: 32 bits.

    Returns:
        32 bits for each entry, as int32.
    """
    found = index ^ _signed(seed)
    # `>>` of a negative int32 fills up with ones, where the hash wants zeros.
    for shift, factor in _ROUNDS:
        found = (found ^ ((found >> shift) & (_MASK >> shift))) * _signed(factor)
    return found ^ ((found >> 16) & 0xFFFF)


def cut_bits(values: Tensor, random: Tensor | int, count: int) -> Tensor:
    """Return the bits of float32 numbers, rounded to multiples of ``2**count``.

    Args:
        values: float32.
        random: The lowest 16 bits of each number are used.
        count: Bits that are cut off, at least 16.

    Returns:
        int32, shifted to the right by `count`; the sign stays the highest bit.
    """
    # Random bits carry with the probability of the bits that are cut off.
    return (values.view(torch.int32) + ((random & 0xFFFF) << (count - 16))) >> count


def round_to_bfloat16(values: Tensor, random: Tensor | int, out: Tensor) -> None:
    """Round float32 numbers to bfloat16.

    Args:
        values: float32.
        random: The lowest 16 bits of each number are used.
        out: Receives the numbers.
    """
    rounded = (cut_bits(values, random, 16) << 16).view(torch.float32)
    # Adding to a NaN could carry into its sign or make it infinite.
    out.copy_(torch.where(values.isnan(), values, rounded))
