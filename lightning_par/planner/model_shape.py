"""Reads the shape of a transformer from a configuration, ours or one of transformers."""

from typing import Any

from lightning_par.errors import ConfigurationError
from lightning_par.planner.shapes import TransformerShape

__all__ = ["experts_of_token", "find_shape", "read_shape"]

_NAMES = {
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "model_dim": ("model_dim", "hidden_size", "n_embd"),
    "heads": ("num_heads", "num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim",),
    "ff_dim": ("ff_dim", "moe_intermediate_size", "intermediate_size", "n_inner"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("experts_per_token", "num_experts_per_tok", "top_k_experts"),
    "shared_experts": ("num_shared_experts", "n_shared_experts"),
}
"""Field of `TransformerShape` -> its names: of the reference models, then of transformers."""
_LENGTHS = ("max_length", "max_position_embeddings", "n_positions")
_REQUIRED = ("layers", "model_dim", "heads", "vocab")
_ALIKE = 1.5
"""How far the weights of a shape may be from those of its model. Norms, biases and positions, which
a shape leaves out, are a third of the smallest models."""


def read_shape(config: Any, length: int | None = None) -> TransformerShape:
    """Return the shape that a model's configuration describes.

    Args:
        config: A `GPTConfig`, `BertConfig` or `MixtralConfig`, or one of transformers.
        length: T; None: the longest that the configuration allows.

    Raises:
        ConfigurationError: A size is missing, as in a model that is no transformer of equal blocks.
    """
    # The first name that the configuration has: ours before those of transformers.
    found: dict[str, Any] = {
        field: value
        for field, names in _NAMES.items()
        if (value := _first(config, names)) is not None
    }
    missing = [_NAMES[field][0] for field in _REQUIRED if field not in found]
    length = length or _first(config, _LENGTHS)
    if missing or length is None:
        names = ", ".join([*missing, *(["max_length"] if length is None else [])])
        raise ConfigurationError(
            "LP907",
            f"the configuration {type(config).__name__} has no {names}, which the prediction of "
            f"memory and time needs. Add {names} to the configuration. In place of max_length you "
            "can pass --length with the number of tokens of a sample.",
        )
    activation = _first(config, ("activation", "hidden_act")) or ""
    # transformers' gated models name SiLU; GPT-2 and BERT name GELU.
    gated = activation in ("swiglu", "silu")
    tied = _first(config, ("tied_head", "tie_word_embeddings"))
    bounded = getattr(config, "routing", None) in ("switch", "expert_choice")
    dropout = _first(config, ("dropout", "attention_dropout", "attn_pdrop"))
    return TransformerShape(
        **found,
        length=length,
        gated=gated,
        tied=True if tied is None else tied,
        causal=not _is_encoder(config),
        expert_capacity=config.capacity(length) if bounded else 0,
        dropout=bool(dropout),
        chunked_loss=bool(getattr(config, "chunked_loss", False)),
    )


def find_shape(module: Any, length: int | None = None) -> TransformerShape:
    """Return the shape of a model, from the first configuration inside that describes it.

    Args:
        module: Module of torch, whose parameters may be on meta.
        length: T; None: the longest that the configuration allows.

    Raises:
        ConfigurationError: No module has a configuration that can be read, or it describes another
            number of weights than the model has, as where it is one of several models.
    """
    given = (getattr(child, "config", None) for child in module.modules())
    # The first one that has all sizes; vision towers and wrappers may have others.
    configs = [c for c in given if all(_first(c, _NAMES[field]) for field in _REQUIRED)]
    name = type(module).__name__
    if not configs:
        raise ConfigurationError(
            "LP907",
            f"no module of {name} has an attribute `config` from which the time of a step can be "
            f"predicted. If {name} is a transformer of equal blocks, give it a `config` with "
            "num_layers, model_dim, num_heads and vocab_size, such as GPTConfig",
        )
    shape = read_shape(configs[0], length)
    held = sum(parameter.numel() for parameter in module.parameters())
    # A configuration of one of several models would describe a part of the weights.
    if not 1 / _ALIKE < held / shape.parameters < _ALIKE:
        raise ConfigurationError(
            "LP907",
            f"{type(configs[0]).__name__} describes a transformer with {shape.parameters:,} "
            f"weights, but {name} has {held:,}, so the time of {name} cannot be predicted from "
            "this configuration. Correct its sizes if they are wrong",
        )
    return shape


def experts_of_token(model: Any) -> int:
    """Return how many experts a token passes in a layer, by the first configuration that says so.

    Args:
        model: Module of torch.
    """
    configs = (getattr(child, "config", None) for child in model.modules())
    counts = (_first(config, _NAMES["experts_per_token"]) for config in configs)
    return next(filter(None, counts), 1)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _is_encoder(config: Any) -> bool:
    """Return whether tokens see later ones; our BERT's configuration has a token that hides."""
    return hasattr(config, "mask_id") or getattr(config, "model_type", "") in ("bert", "roberta")
