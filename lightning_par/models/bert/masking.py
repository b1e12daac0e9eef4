"""Hiding tokens for masked language models, drawn anew in every step and alike on every layout.

Shapes: B samples, T tokens, V vocabulary.

Note [Draws without a generator]: what is hidden is a function of the sample's own tokens, of the
step and of the position, through an integer hash. It therefore does not depend on which rank or in
which micro-batch a sample is, and all ranks of a replica agree without a word. A generator gives
other numbers as soon as a batch is cut in another way.
"""

import torch
from torch import Tensor

__all__ = ["IGNORED", "hash_uniform", "mask_tokens"]

IGNORED = -100
"""Label of a token that was not chosen."""

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_KEEP, _REPLACE = 0.1, 0.2  # of the chosen: below 0.1 kept, below 0.2 replaced, else masked


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number would."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 numbers: a bijection whose every output bit depends on every input bit."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def hash_uniform(tokens: Tensor, step: int, stream: int) -> Tensor:
    """Return numbers in [0, 1) that depend on the whole row, the position, the step and the stream.

    Args:
        tokens: [B, T], int64.
        step: Another one gives other numbers.
        stream: Likewise, for several draws in one step.

    Returns:
        [B, T], float64.

    **Source**: Steele et al. 2014 (SplitMix64), its finalizer.
    """
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * _GOLDEN
    row = _mix((tokens + 1) * _GOLDEN ^ _mix(place)).sum(1, keepdim=True)
    key = _mix(_mix(row + step) + stream)
    return _shift(_mix(key + place), 11).double() * 2.0**-53


def mask_tokens(
    tokens: Tensor,
    maskable: Tensor,
    *,
    step: int,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Choose `rate` of every sample's tokens: 80 % are masked, 10 % replaced, 10 % left as they
    are.

    Of n tokens that may be chosen, exactly ``max(1, round(rate * n))`` are, so that what the loss
    averages over is known before anything is drawn.

    Args:
        tokens: [B, T], int64.
        maskable: [B, T], bool: neither padding nor special.
        step: Chooses anew; see Note [Draws without a generator].
        mask_id: Takes the place of a masked token.
        vocab_size: V; a replacement is any token.
        rate: 0 .. 1.

    Returns:
        The tokens to show [B, T], and as labels the chosen tokens, `IGNORED` elsewhere [B, T].

    **Source**: Devlin et al. (1810.04805), section 3.1 and appendix A.1.
    """
    draws = hash_uniform(tokens, step, 0).masked_fill(~maskable, 2.0)
    counts = maskable.sum(1, keepdim=True)
    wanted = (counts * rate).round().clamp(min=1).minimum(counts)
    ranks = draws.argsort(dim=1).argsort(dim=1)
    chosen = ranks < wanted
    labels = tokens.masked_fill(~chosen, IGNORED)
    fate = hash_uniform(tokens, step, 1)
    other = (hash_uniform(tokens, step, 2) * vocab_size).long()
    shown = tokens.where(fate < _KEEP, other).where(
        fate < _REPLACE, torch.full_like(tokens, mask_id)
    )
    return shown.where(chosen, tokens), labels
