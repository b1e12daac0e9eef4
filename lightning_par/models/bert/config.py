"""Configuration of the reference BERT, and the published sizes by name.

Shapes: D model dim, F feed-forward dim, T tokens, V vocabulary, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_par.errors import ConfigurationError, nearest, raise_problems

__all__ = ["BERT_PRESETS", "BertConfig"]


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Configuration of a `Bert`: sizes, heads and initialization.

    Attributes:
        vocab_size: V, special tokens included.
        max_length: Largest T, the number of learned positions.
        num_layers: L.
        model_dim: D.
        num_heads: Number of attention heads; divides D.
        ff_dim: F.
        num_segments: Number of token types (rows of the segment embedding).
        mask_id: Token id of [MASK]; None: V - 1.
        order_head: Whether there is a second head for sentence-order prediction (SOP). It reads the
            first token of a sample, which excludes context parallelism.
        dropout: Dropout probability, 0 <= p < 1.
        norm_eps: Epsilon of the LayerNorms.
        init_std: Standard deviation of the initial matrices and tables.
        chunked_loss: Whether a loss computes logits in chunks of tokens, so that they are never
            whole; see `linear_cross_entropy`.

    Raises:
        ConfigurationError: A value is out of range, or `num_heads` does not divide D; lists every
            problem.

    Examples:
        >>> BertConfig(model_dim=64, num_heads=4).num_layers
        4
    """

    vocab_size: int = 260
    max_length: int = 256
    num_layers: int = 4
    model_dim: int = 64
    num_heads: int = 4
    ff_dim: int = 256
    num_segments: int = 2
    mask_id: int | None = None
    order_head: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-12
    init_std: float = 0.02
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        counts = ("vocab_size", "max_length", "num_layers", "model_dim", "num_heads", "ff_dim")
        problems = [
            f"{name}={getattr(self, name)} must be 1 or more."
            for name in (*counts, "num_segments")
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be greater than 0."
            for name in ("norm_eps", "init_std")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be at least 0 and less than 1.")
        if not problems and self.model_dim % self.num_heads:
            fit = [n for n in range(1, self.model_dim + 1) if self.model_dim % n == 0]
            problems.append(
                f"num_heads={self.num_heads} does not divide model_dim={self.model_dim}; "
                f"use one of {fit}."
            )
        if self.mask_id is None:
            object.__setattr__(self, "mask_id", self.vocab_size - 1)  # frozen
        elif not 0 <= self.mask_id < self.vocab_size:
            problems.append(f"mask_id={self.mask_id} must be 0 .. {self.vocab_size - 1}.")
        raise_problems(ConfigurationError, "LP912", problems)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "BertConfig":
        """Return a published or test configuration by name.

        Args:
            name: A key of `BERT_PRESETS`: ``"tiny"``, ``"base"``, ``"large"``.
            **overrides: Field -> value in place of the preset's.

        Raises:
            ConfigurationError: No preset has that name, or an override is not a field.
        """
        problems = []
        if name not in BERT_PRESETS:
            problems.append(f"preset {name!r} is none of {', '.join(BERT_PRESETS)}.")
        for key in sorted(set(overrides) - set(cls.__dataclass_fields__)):
            hint = nearest(key, cls.__dataclass_fields__)
            problems.append(f"{key!r} is not a field of BertConfig{hint}")
        raise_problems(ConfigurationError, "LP901", problems)
        return cls(**{**BERT_PRESETS[name], **overrides})

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model; the tied embedding counts once."""
        # In closed form: the model may be too large to build, or be on several ranks.
        dim, ff, vocab = self.model_dim, self.ff_dim, self.vocab_size
        tables = (vocab + self.max_length + self.num_segments) * dim + 2 * dim
        block = 4 * (dim * dim + dim) + 2 * dim * ff + ff + dim + 4 * dim
        head = dim * dim + dim + 2 * dim + vocab
        order = dim * dim + dim + 2 * dim + 2 if self.order_head else 0
        return tables + self.num_layers * block + head + order


def _published(layers: int, dim: int, heads: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "model_dim": dim, "num_heads": heads, "ff_dim": 4 * dim}
    return {**sizes, "vocab_size": 30_522, "max_length": 512, "mask_id": 103, "dropout": 0.1}


BERT_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "base": _published(12, 768, 12),
    "large": _published(24, 1024, 16),
}
"""Name -> fields of `BertConfig`.

**Source**: Devlin et al. (1810.04805), section 3, with the vocabulary of the uncased release.
"""
