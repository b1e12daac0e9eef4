"""Configuration of the reference mixture of experts: sizes, routing and load balancing.

Shapes: D model dim, F feed-forward dim of one expert, T tokens, V vocabulary, E experts, k of them
per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, Literal

from lightning_par.errors import ConfigurationError, nearest, raise_problems
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.mixtral.grouped_linear import GroupedBackend

__all__ = ["MIXTRAL_PRESETS", "Balance", "MixtralConfig", "Routing"]

Routing = Literal["top_k", "switch", "noisy_top_k", "expert_choice"]
Balance = Literal["auxiliary", "bias", "none"]


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(GPTConfig):
    """Configuration of a `Mixtral`: a `GPTConfig` (SwiGLU, rotary positions) and these fields.

    Attributes:
        num_experts: E.
        experts_per_token: k (top-k), 1 .. E.
        routing: Routing method; see `Router`.
        capacity_factor: For ``switch`` and ``expert_choice``: the capacity of an expert is
            ``ceil(capacity_factor * k * T / E)`` tokens of a sequence.
        balance: Load balancing: ``"auxiliary"`` loss, ``"bias"`` (auxiliary-loss-free: a bias on
            the choice that follows the load), or ``"none"``, which ``expert_choice`` requires,
            since its load is even.
        auxiliary_weight: Weight of the balance loss in the total loss, 0 or more.
        z_weight: Weight of the router z-loss in the total loss, 0 or more.
        bias_rate: Change of an expert's bias per optimizer step, 0 or more.
        num_shared_experts: Number of shared experts, which see every token; 0: none.
        backend: Kernel of the grouped matrix products; see `grouped_product`.

    Raises:
        ConfigurationError: A value is out of range or contradicts another; lists every problem.

    Examples:
        >>> MixtralConfig.preset("tiny").experts_per_token
        2
    """

    num_experts: int = 8
    experts_per_token: int = 2
    routing: Routing = "top_k"
    capacity_factor: float = 1.25
    balance: Balance = "auxiliary"
    auxiliary_weight: float = 0.02
    z_weight: float = 0.001
    bias_rate: float = 0.001
    num_shared_experts: int = 0
    backend: GroupedBackend = "auto"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be {' or '.join(map(repr, get_args(choice)))}."
            for name, choice in (
                ("routing", Routing),
                ("balance", Balance),
                ("backend", GroupedBackend),
            )
            if getattr(self, name) not in get_args(choice)
        ]
        problems += self._check_numbers()
        # Inherited fields for which this model has one implementation.
        for name, only in (("positions", "rotary"), ("activation", "swiglu")):
            if getattr(self, name) != only:
                problems.append(f"{name}={getattr(self, name)!r} must be {only!r}.")
        if self.bias:
            problems.append(
                "bias=True is not supported, since the experts have no biases. Use bias=False."
            )
        raise_problems(ConfigurationError, "LP912", problems)
        super().__post_init__()

    def _check_numbers(self) -> list[str]:
        problems = []
        if self.num_experts < 1:
            problems.append(f"num_experts={self.num_experts} must be 1 or more.")
        elif not 1 <= self.experts_per_token <= self.num_experts:
            problems.append(
                f"experts_per_token={self.experts_per_token} must be 1 .. "
                f"num_experts={self.num_experts}."
            )
        if self.routing == "switch" and self.experts_per_token != 1:
            problems.append(
                "routing='switch' sends each token to one expert, but "
                f"experts_per_token={self.experts_per_token}. Use experts_per_token=1."
            )
        if self.routing == "expert_choice" and self.balance != "none":
            problems.append(
                f"balance={self.balance!r} is not supported with routing='expert_choice', which "
                "always balances the experts. Use balance='none'."
            )
        if self.capacity_factor <= 0:
            problems.append(f"capacity_factor={self.capacity_factor} must be greater than 0.")
        problems += [
            f"{name}={getattr(self, name)} must be 0 or more."
            for name in ("auxiliary_weight", "z_weight", "bias_rate", "num_shared_experts")
            if getattr(self, name) < 0
        ]
        return problems

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "MixtralConfig":
        """Return a published or test configuration by name.

        Args:
            name: A key of `MIXTRAL_PRESETS`, for example ``"tiny"``, ``"mixtral-8x7b"``.
            **overrides: Field -> value in place of the preset's.

        Raises:
            ConfigurationError: No preset has that name, or an override is not a field.
        """
        problems = []
        if name not in MIXTRAL_PRESETS:
            problems.append(f"preset {name!r} is none of {', '.join(MIXTRAL_PRESETS)}.")
        for key in sorted(set(overrides) - set(cls.__dataclass_fields__)):
            hint = nearest(key, cls.__dataclass_fields__)
            problems.append(f"{key!r} is not a field of MixtralConfig{hint}")
        raise_problems(ConfigurationError, "LP901", problems)
        return cls(**{**MIXTRAL_PRESETS[name], **overrides})

    def capacity(self, length: int) -> int:
        """Return the capacity of an expert: its maximum number of tokens of a sequence.

        Args:
            length: T.
        """
        # Per sequence and not per batch, so that it does not depend on how a batch is split.
        wanted = -(-self.capacity_factor * self.experts_per_token * length // self.num_experts)
        return min(length, int(wanted))

    def _per_layer(self, experts: int) -> int:
        """Return the number of weights in the linear maps of a layer.

        Args:
            experts: Number of experts to count: k for a token's FLOPs, E for all parameters.
        """
        dim, ff = self.model_dim, self.ff_dim or 0
        attention = 2 * dim * dim + 2 * dim * self.kv_heads * self.head_dim
        gates = 2 if self.routing == "noisy_top_k" else 1
        return attention + gates * self.num_experts * dim + 3 * dim * ff * experts

    @property
    def linear_parameters(self) -> int:
        """Number of weights that multiply a token: k and the shared experts, head included."""
        used = self.experts_per_token + self.num_shared_experts
        return self.num_layers * self._per_layer(used) + self.vocab_size * self.model_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model, all experts; a tied weight counts once."""
        dim = self.model_dim
        norm = dim * (2 if self.norm == "layernorm" and self.bias else 1)
        layer = self._per_layer(self.num_experts + self.num_shared_experts) + 2 * norm
        tables = self.vocab_size * dim * (1 if self.tied_head else 2)
        return self.num_layers * layer + tables + norm


def _mixtral(layers: int, dim: int, heads: int, ff_dim: int, vocab: int, length: int) -> Any:
    sizes = {"num_layers": layers, "model_dim": dim, "num_heads": heads, "ff_dim": ff_dim}
    other = {"num_kv_heads": 8, "vocab_size": vocab, "max_length": length, "tied_head": False}
    return {**sizes, **other, "rope_theta": 1e6}


MIXTRAL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"num_kv_heads": 2, "ff_dim": 128},
    "small": {
        "max_length": 512,
        "num_layers": 8,
        "model_dim": 384,
        "num_heads": 6,
        "num_kv_heads": 2,
        "ff_dim": 512,
    },
    "1b": {**_mixtral(16, 1024, 16, 2048, 32_000, 4096), "rope_theta": 10_000.0},
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14_336, 32_000, 32_768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16_384, 32_000, 65_536),
}
"""Name -> fields of `MixtralConfig`.

**Source**: Jiang et al. (2401.04088), table 1, and the configurations released with the weights.
"""
