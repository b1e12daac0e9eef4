"""Rounding means to bfloat16 at random; see Note [Short moments]. The same bits as in adam.cpp."""

import torch
from torch import Tensor

__all__ = ["mixed", "round_randomly"]

_MASK = 0xFFFFFFFF


def mixed(number: int) -> int:
    """Return 32 bits in which every bit depends on every bit of `number`."""
    number &= _MASK
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & _MASK
    number = ((number ^ (number >> 15)) * 0x846CA68B) & _MASK
    return number ^ (number >> 16)


def round_randomly(
    mean: Tensor, square: Tensor, mean_out: Tensor, square_out: Tensor, first: int, seed: int
) -> None:
    """Round two flat tensors to bfloat16.

    Args:
        mean: float32.
        square: float32, of as many entries.
        mean_out: bfloat16.
        square_out: bfloat16.
        first: Number of the first entry.
        seed: 32 bits.
    """
    places = torch.arange(first, first + mean.numel()) & _MASK
    random = places ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        random = ((random ^ (random >> shift)) * factor) & _MASK
    random ^= random >> 16
    _round(mean, mean_out, random & 0xFFFF)
    _round(square, square_out, random >> 16)


def _round(values: Tensor, out: Tensor, random: Tensor) -> None:
    bits = values.view(torch.int32).long() & _MASK
    rounded = ((bits + random) >> 16) << 16
    rounded = torch.where(values.isnan(), bits | 0x400000, rounded)
    signed = torch.where(rounded > 0x7FFFFFFF, rounded - 2**32, rounded)
    out.copy_(signed.int().view(torch.float32))
