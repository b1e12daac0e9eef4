"""Configuration of the reference GPT, published sizes by name, parameter and FLOP counts.

Shapes: D model dim, F feed-forward dim, H head dim, T tokens, V vocabulary, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, Literal

from lightning_par.errors import ConfigurationError, nearest, raise_problems
from lightning_par.models.layers import NormKind

__all__ = ["PRESETS", "GPTConfig"]

Positions = Literal["rotary", "learned"]
Activation = Literal["swiglu", "gelu"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Configuration of a `GPT`: sizes, kinds of layers and initialization.

    Attributes:
        vocab_size: V.
        max_length: Largest T; learned positions end there, rotary ones do not.
        num_layers: L.
        model_dim: D.
        num_heads: Number of query heads; divides D.
        num_kv_heads: Number of key/value heads (GQA); divides `num_heads`. None: `num_heads`.
        ff_dim: F. None: 4 D for GELU; 8/3 D, rounded up to a multiple of 64, for SwiGLU.
        norm: Normalization before attention, before the MLP and before the head.
        positions: Rotary embeddings, or a learned table that is added to the token embeddings.
        activation: SwiGLU (gated) or GELU MLP.
        tied_head: Whether the head shares the weight of the embedding.
        bias: Whether linear layers and LayerNorms have a bias (the head never has).
        dropout: Dropout probability, 0 <= p < 1.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Epsilon of the norms.
        init_std: Standard deviation of the initial weights.
        chunked_loss: Whether a loss computes logits in chunks of tokens, so that they are never
            whole; see `linear_cross_entropy`.

    Raises:
        ConfigurationError: A value is out of range, or a number of heads does not divide; lists
            every problem.

    Examples:
        >>> GPTConfig.preset("gpt2").num_parameters
        124439808
    """

    vocab_size: int = 256
    max_length: int = 256
    num_layers: int = 4
    model_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int | None = None
    ff_dim: int | None = None
    norm: NormKind = "rmsnorm"
    positions: Positions = "rotary"
    activation: Activation = "swiglu"
    tied_head: bool = True
    bias: bool = False
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.ff_dim is None:
            # 8/3 D with three matrices has the parameters of 4 D with two.
            gated = -(-8 * self.model_dim // (3 * 64)) * 64
            wide = gated if self.activation == "swiglu" else 4 * self.model_dim
            object.__setattr__(self, "ff_dim", wide)
        problems = self._check_ranges()
        raise_problems(ConfigurationError, "LP912", problems or self._check_heads())

    def _check_ranges(self) -> list[str]:
        counts = (
            "vocab_size",
            "max_length",
            "num_layers",
            "model_dim",
            "num_heads",
            "num_kv_heads",
            "ff_dim",
        )
        problems = [
            f"{name}={getattr(self, name)} must be 1 or more."
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be greater than 0."
            for name in ("rope_theta", "norm_eps", "init_std")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be at least 0 and less than 1.")
        choices = {"norm": NormKind, "positions": Positions, "activation": Activation}
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                allowed = " or ".join(repr(value) for value in get_args(choice))
                problems.append(f"{name}={getattr(self, name)!r} must be {allowed}.")
        return problems

    def _check_heads(self) -> list[str]:
        problems = []
        if self.model_dim % self.num_heads:
            fit = _divisors(self.model_dim)
            problems.append(
                f"num_heads={self.num_heads} does not divide model_dim={self.model_dim}; "
                f"use one of {fit}."
            )
        elif self.positions == "rotary" and self.head_dim % 2:
            problems.append(
                f"rotary positions need an even head dim, but model_dim={self.model_dim} / "
                f"num_heads={self.num_heads} is {self.head_dim}; use positions='learned' or "
                "another num_heads."
            )
        if self.num_heads % self.kv_heads:
            problems.append(
                f"num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}; "
                f"use one of {_divisors(self.num_heads)}."
            )
        return problems

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Return a published or test configuration by name.

        Args:
            name: A key of `PRESETS`, for example ``"tiny"``, ``"gpt2"``, ``"gpt3-175b"``.
            **overrides: Field -> value in place of the preset's.

        Raises:
            ConfigurationError: No preset has that name, or an override is not a field.
        """
        problems = []
        if name not in PRESETS:
            hint = nearest(name, PRESETS, otherwise="")
            problems.append(f"preset {name!r} is none of {', '.join(PRESETS)}{hint}")
        for key in sorted(set(overrides) - set(cls.__dataclass_fields__)):
            hint = nearest(key, cls.__dataclass_fields__)
            problems.append(f"{key!r} is not a field of GPTConfig{hint}")
        raise_problems(ConfigurationError, "LP901", problems)
        return cls(**{**PRESETS[name], **overrides})

    @property
    def head_dim(self) -> int:
        """H = D / number of query heads."""
        return self.model_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, an int; `num_kv_heads` is typed as optional."""
        return self.num_kv_heads or self.num_heads

    @property
    def linear_parameters(self) -> int:
        """Number of weights that multiply every token, head included; biases are not counted."""
        dim, ff = self.model_dim, self.ff_dim or 0
        attention = 2 * dim * dim + 2 * dim * self.kv_heads * self.head_dim
        mlp = (3 if self.activation == "swiglu" else 2) * dim * ff
        return self.num_layers * (attention + mlp) + self.vocab_size * dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model; a tied weight counts once."""
        # In closed form: the model may be too large to build, or be on several ranks.
        dim, ff = self.model_dim, self.ff_dim or 0
        tables = 0 if self.tied_head else self.vocab_size * dim
        tables += self.max_length * dim if self.positions == "learned" else 0
        norm = dim * (2 if self.norm == "layernorm" and self.bias else 1)
        gates = 2 if self.activation == "swiglu" else 1
        biases = 3 * dim + 2 * self.kv_heads * self.head_dim + gates * ff if self.bias else 0
        return self.linear_parameters + tables + self.num_layers * (2 * norm + biases) + norm

    def flops_per_token(self, length: int) -> int:
        """Return the floating-point operations that training needs per token.

        ``6 P + 12 L D T``: a weight that multiplies a token costs 2 operations forward and 4
        backward; scores and their product with the values cost 2 D T each per layer forward, and
        twice that backward. As usual for MFU, all T x T scores are counted although a causal kernel
        skips half, and recomputation is not.

        Args:
            length: T.

        **Source**: Chowdhery et al., PaLM (2204.02311), appendix B. P here is `linear_parameters`:
        the embedding table is looked up, not multiplied, and an untied one is left out.
        """
        return 6 * self.linear_parameters + 12 * self.num_layers * self.model_dim * length


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _gpt2(layers: int, dim: int, heads: int, **other: Any) -> dict[str, Any]:
    """Sizes in the style of GPT-2 and GPT-3: LayerNorm, GELU, biases, learned positions, tied."""
    style = {
        "vocab_size": 50_257,
        "max_length": 1024,
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
    }
    return {**style, "num_layers": layers, "model_dim": dim, "num_heads": heads, **other}


def _llama(
    layers: int, dim: int, heads: int, ff_dim: int, kv_heads: int | None = None, **other: Any
) -> dict[str, Any]:
    """Sizes in the style of Llama: RMSNorm, SwiGLU, no bias, rotary positions, untied."""
    sizes = {"num_layers": layers, "model_dim": dim, "num_heads": heads}
    style = {"ff_dim": ff_dim, "num_kv_heads": kv_heads, "tied_head": False}
    return {**sizes, **style, **other}


_LLAMA3 = {"vocab_size": 128_256, "max_length": 8192, "rope_theta": 500_000.0}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"num_kv_heads": 2},
    "small": {
        "max_length": 512,
        "num_layers": 8,
        "model_dim": 384,
        "num_heads": 6,
        "num_kv_heads": 2,
    },
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt2(12, 768, 12, max_length=2048),
    "gpt3-350m": _gpt2(24, 1024, 16, max_length=2048),
    "gpt3-760m": _gpt2(24, 1536, 16, max_length=2048),
    "gpt3-1.3b": _gpt2(24, 2048, 16, max_length=2048),
    "gpt3-2.7b": _gpt2(32, 2560, 32, max_length=2048),
    "gpt3-6.7b": _gpt2(32, 4096, 32, max_length=2048),
    "gpt3-13b": _gpt2(40, 5120, 40, max_length=2048),
    "gpt3-175b": _gpt2(96, 12_288, 96, max_length=2048),
    "mt-nlg-530b": _gpt2(105, 20_480, 128, max_length=2048, vocab_size=51_200),
    "llama2-7b": _llama(32, 4096, 32, 11_008, vocab_size=32_000, max_length=4096),
    "llama3-8b": _llama(32, 4096, 32, 14_336, 8, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, 28_672, 8, **_LLAMA3),
    "llama3-405b": _llama(126, 16_384, 128, 53_248, 8, **_LLAMA3),
}
"""Name -> fields of `GPTConfig`.

**Source**: GPT-2, Radford et al. 2019, table 2 and the released weights; GPT-3, Brown et al.
(2005.14165), table 2.1, where two rows do not add up: "1.3b" takes 16 heads of 128 (the table says
24), "13b" takes D = 5120 (the table says 5140). GPT-3's alternating sparse attention is dense here.
MT-NLG, Smith et al. (2201.11990), section 3.1, with the vocabulary of Megatron.
Llama 2 (2307.09288), Llama 3 (2407.21783).
"""
