"""Size of the chunks in which a loss computes logits; without torch, for forecasts.

Shapes: N tokens, D model dim, V vocabulary; a rank holds V/tp columns.
"""

__all__ = ["chunk_tokens"]

_LEAST_TOKENS = 256
"""Of a chunk: each adds to the whole gradient of the weight, which fewer tokens would not pay."""


def chunk_tokens(tokens: int, columns: int, dim: int) -> int:
    """Return the tokens of a chunk: their logits take as much as all hidden states, or 256 tokens.

    Args:
        tokens: N.
        columns: V/tp.
        dim: D.
    """
    return max(1, min(tokens, max(_LEAST_TOKENS, -(-tokens * dim // max(1, columns)))))
