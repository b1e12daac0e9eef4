"""Dynamic masking for masked language models, independent of how a batch is split over ranks.

Shapes: B samples, T tokens, V vocabulary.

Note [Draws without a generator]: the mask is an integer hash of the sample's own tokens, the step
and the position. It therefore does not depend on the rank or the micro-batch of a sample, and all
ranks of a replica draw the same without communication. The numbers of a random generator change as
soon as a batch is split in another way.
"""

import torch
from torch import Tensor

__all__ = ["IGNORED", "hash_uniform", "mask_tokens"]

IGNORED = -100
"""Label of a token that was not selected; `ignore_index` of the loss."""

# Constants of SplitMix64. Less 2^64, since torch has no arithmetic of uint64: int64 wraps around to
# the same bits.
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
_KEEP, _REPLACE = 0.1, 0.2  # of the selected: draws below 0.1 keep, below 0.2 replace, else mask


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right and fill with zeros; torch's ``>>`` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return the SplitMix64 finalizer of int64: a bijection with full avalanche."""
    x = (x ^ _logical_shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _logical_shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _logical_shift(x, 31)


def hash_uniform(tokens: Tensor, step: int, stream: int) -> Tensor:
    """Return uniform numbers in [0, 1), a hash of the whole row, the position, step and stream.

    Args:
        tokens: [B, T], int64.
        step: Number of the training step; each gives independent numbers.
        stream: Number of the draw within a step, likewise.

    Returns:
        [B, T], float64.

    **Source**: Steele et al. 2014 (SplitMix64), its finalizer.
    """
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * _GOLDEN_RATIO
    row = _mix((tokens + 1) * _GOLDEN_RATIO ^ _mix(position)).sum(1, keepdim=True)
    key = _mix(_mix(row + step) + stream)
    # The upper 53 bits are the mantissa of a float64.
    return _logical_shift(_mix(key + position), 11).double() * 2.0**-53


def mask_tokens(
    tokens: Tensor,
    maskable: Tensor,
    *,
    step: int,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Select tokens for prediction: 80 % become [MASK], 10 % a random token, 10 % stay.

    Of n maskable tokens exactly ``max(1, round(rate * n))`` are selected, so that the number of
    labels, the weight of a sample in the loss, is known in advance.

    Args:
        tokens: [B, T], int64.
        maskable: [B, T], bool: True for tokens that are neither padding nor special.
        step: Number of the training step; see Note [Draws without a generator].
        mask_id: Token id of [MASK].
        vocab_size: V; a random token is any of them.
        rate: Fraction of the maskable tokens that is selected, 0 .. 1.

    Returns:
        Inputs [B, T], and labels [B, T]: the original token where selected, else `IGNORED`.

    **Source**: Devlin et al. (1810.04805), section 3.1 and appendix A.1.
    """
    draws = hash_uniform(tokens, step, 0).masked_fill(~maskable, 2.0)  # behind all others
    counts = maskable.sum(1, keepdim=True)
    wanted = (counts * rate).round().clamp(min=1).minimum(counts)
    # Two argsorts give every draw its rank in the row: the `wanted` smallest are selected.
    ranks = draws.argsort(dim=1).argsort(dim=1)
    selected = ranks < wanted
    labels = tokens.masked_fill(~selected, IGNORED)
    treatment = hash_uniform(tokens, step, 1)
    random_tokens = (hash_uniform(tokens, step, 2) * vocab_size).long()
    inputs = tokens.where(treatment < _KEEP, random_tokens).where(
        treatment < _REPLACE, torch.full_like(tokens, mask_id)
    )
    return inputs.where(selected, tokens), labels
