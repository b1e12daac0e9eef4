"""Stochastic rounding of moments to bfloat16, with the same random bits as adam.cpp.

See Note [Stochastic rounding] in `cpu_kernels`.
"""

import torch
from torch import Tensor

__all__ = ["mixed", "round_randomly"]

_MASK = 0xFFFFFFFF


def mixed(number: int) -> int:
    """Return a 32-bit hash of `number`; every bit of it depends on every bit of the input."""
    number &= _MASK
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & _MASK
    number = ((number ^ (number >> 15)) * 0x846CA68B) & _MASK
    return number ^ (number >> 16)


def round_randomly(
    mean: Tensor, square: Tensor, mean_out: Tensor, square_out: Tensor, first: int, seed: int
) -> None:
    """Round the moments of one parameter, or of a slice of it, to bfloat16.

    Args:
        mean: First moment, flat, float32.
        square: Second moment, flat, float32.
        mean_out: Receives the rounded first moment, bfloat16.
        square_out: Receives the rounded second moment, bfloat16.
        first: Index of the first entry in the whole parameter.
        seed: Hash of the step, 32 bits.
    """
    # int64 holds the unsigned 32-bit arithmetic of adam.cpp, which torch has no dtype for.
    # The same hash as in adam.cpp, entry by entry.
    random = (torch.arange(first, first + mean.numel()) & _MASK) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        random = ((random ^ (random >> shift)) * factor) & _MASK
    random ^= random >> 16
    # One hash serves both moments: 16 bits each, as many as bfloat16 cuts off.
    _round(mean, mean_out, random & 0xFFFF)
    _round(square, square_out, random >> 16)


def _round(values: Tensor, out: Tensor, random: Tensor) -> None:
    bits = values.view(torch.int32).long() & _MASK
    # Adding 16 random bits carries with the probability of the bits that are cut off.
    rounded = ((bits + random) >> 16) << 16
    # Adding to a NaN could carry into its sign or make it infinite.
    rounded = torch.where(values.isnan(), bits | 0x400000, rounded)
    signed = torch.where(rounded > 0x7FFFFFFF, rounded - 2**32, rounded)
    out.copy_(signed.int().view(torch.float32))
