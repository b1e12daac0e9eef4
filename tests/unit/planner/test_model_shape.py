"""Shapes read from configurations count the parameters that the configurations count."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from lightning_par.errors import ConfigurationError
from lightning_par.models.bert.config import BertConfig
from lightning_par.models.gpt.config import GPTConfig, PRESETS
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.planner.model_shape import experts_of_token, read_shape


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_and_flops_of_every_preset(preset: str) -> None:
    config = GPTConfig.preset(preset)
    shape = read_shape(config)
    assert shape.parameters == pytest.approx(config.num_parameters, rel=0.02)
    length = config.max_length
    assert shape.flops(3) == pytest.approx(3 * length * config.flops_per_token(length), rel=1e-9)
    assert (shape.gated, shape.tied) == (config.activation == "swiglu", config.tied_head)


def test_experts_and_encoders() -> None:
    config = MixtralConfig.preset("mixtral-8x7b")
    shape = read_shape(config, 4096)
    assert (shape.experts, shape.experts_per_token, shape.length) == (8, 2, 4096)
    assert shape.parameters == pytest.approx(config.num_parameters, rel=1e-3)
    bert = read_shape(BertConfig.preset("large"))
    assert not bert.causal
    assert bert.dropout
    assert bert.parameters == pytest.approx(BertConfig.preset("large").num_parameters, rel=0.01)


@pytest.mark.parametrize(("name", "gated"), [("llama", True), ("gpt2", False), ("mixtral", True)])
def test_configurations_of_transformers(name: str, gated: bool) -> None:
    config = AutoConfig.for_model(name)
    shape = read_shape(config)
    assert shape.gated == gated
    assert shape.model_dim == config.hidden_size
    assert shape.layers == config.num_hidden_layers
    assert shape.heads == config.num_attention_heads
    assert shape.causal


@pytest.mark.parametrize("name", ["experts_per_token", "num_experts_per_tok", "top_k_experts"])
def test_a_configuration_inside_says_how_many_experts_a_token_passes(name: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert experts_of_token(model) == 1
    model[1].config = SimpleNamespace(**{name: 3})
    assert experts_of_token(model) == 3


def test_what_is_no_transformer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no num_heads, max_length, which"):
        read_shape(SimpleNamespace(num_layers=2, model_dim=8, vocab_size=9))
