import re

import pytest
import torch
from torch.nn.attention import sdpa_kernel, SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from lightning_par.errors import ConfigurationError
from lightning_par.models.gpt.config import GPTConfig, PRESETS
from lightning_par.models.gpt.model import GPT
from lightning_par.models.layers import KeyValueCache
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes

SIZES = {
    "vocab_size": 11,
    "max_length": 9,
    "num_layers": 2,
    "model_dim": 12,
    "num_heads": 6,
    "num_kv_heads": 3,
    "ff_dim": 15,
}
STYLES = {
    "rotary, tied": {},
    "rotary, untied": {"tied_head": False},
    "learned": {
        "positions": "learned",
        "activation": "gelu",
        "norm": "layernorm",
        "bias": True,
    },
    "mixed": {"positions": "learned", "norm": "rmsnorm", "bias": True, "tied_head": False},
}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.manual_seed(0))


def meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


# Counts of the released weights (GPT-2, Llama), and table 2.1 of the GPT-3 paper as it rounds.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}
ROUNDED = {
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
    "mt-nlg-530b": 530e9,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name: str):
    config = GPTConfig.preset(name)
    built = sum(parameter.numel() for parameter in meta(config).parameters())
    assert built == config.num_parameters
    assert built == PUBLISHED.get(name, built)
    assert built == pytest.approx(ROUNDED.get(name, built), rel=0.02)


@pytest.mark.parametrize("style", STYLES)
def test_forward_gives_logits_and_the_counted_parameters(style: str):
    model = GPT(GPTConfig(**SIZES, **STYLES[style]))
    assert model(tokens(2, 5)).shape == (2, 5, 11)
    assert model.num_parameters == sum(p.numel() for p in model.parameters())
    tied = model.config.tied_head
    assert (model.head.weight is model.embed.weight) == tied
    if not tied:
        assert "head.weight" in dict(model.named_parameters())


@pytest.mark.parametrize("style", STYLES)
def test_position_ids_may_be_given_and_are_counted_from_zero_otherwise(style: str):
    model = GPT(GPTConfig(**SIZES, **STYLES[style]))
    ids = tokens(2, 5)
    counted = torch.arange(5).expand(2, 5)
    assert torch.equal(model(ids), model(ids, counted))
    assert not torch.allclose(model(ids), model(ids, counted.flip(1)))


def test_weights_are_drawn_with_smaller_residual_projections():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZES, "model_dim": 120, "num_layers": 8}, bias=True))
    block = model.blocks[3]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.query.bias.abs().max() == 0
    assert torch.equal(block.mlp_norm.weight, torch.ones(120))


@pytest.mark.parametrize("style", ["rotary, tied", "learned"])
def test_flops_per_token_equal_those_that_run(style: str):
    model = GPT(GPTConfig(**SIZES, **STYLES[style]))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens(3, 7)).sum().backward()
    assert counter.get_total_flops() == 3 * 7 * model.flops_per_token(7)


@pytest.mark.parametrize("style", STYLES)
def test_plan_fits_the_model_on_every_axis(style: str):
    model = meta(GPTConfig(**SIZES, **STYLES[style]))
    layout = check_plan(model, model.parallel_plan(), ParallelSizes(tensor=3, pipeline=2))
    assert layout.block_names == ("blocks.0", "blocks.1")
    assert layout.units["head"] == "last"
    assert layout.units["embed"] == "first"
    if model.rotary is not None:
        assert layout.units["rotary"] == "every"


def test_generate_repeats_under_a_seed_and_is_greedy_at_temperature_0():
    model = GPT(GPTConfig(**SIZES, dropout=0.5)).train()
    start = tokens(2, 3)
    one, two = (
        model.generate(start, 9, top_k=4, generator=torch.Generator().manual_seed(7))
        for _ in range(2)
    )
    assert one.shape == (2, 12)
    assert torch.equal(one, two)
    assert torch.equal(one[:, :3], start)
    assert model.training
    greedy = model.generate(start, 1, temperature=0.0)
    assert torch.equal(greedy[:, -1], model.eval()(start)[:, -1].argmax(-1))
    assert torch.equal(model.generate(start, 1, top_k=1), greedy)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generate_with_a_cache_writes_what_it_writes_without(positions: str):
    """Also beyond the longest context, where the window moves."""
    model = GPT(GPTConfig(**SIZES, positions=positions))
    lengths = list[int]()
    model.embed.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    longest = SIZES["max_length"]
    start, new = tokens(2, 3), longest
    cached = model.generate(start, new, temperature=0.0)
    assert lengths == [3] + [1] * (longest - 3) + [longest] * 2
    assert torch.equal(cached, model.generate(start, new, temperature=0.0, use_cache=False))


def test_a_cache_takes_several_tokens_at_once():
    model = GPT(GPTConfig(**SIZES)).double()
    text, cache = tokens(2, 7), KeyValueCache(SIZES["num_layers"])
    parts = [model(part, cache=cache) for part in text.split([2, 4, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_generate_refuses_what_it_cannot_sample(options: dict, text: str):
    with pytest.raises(ConfigurationError, match=text):
        GPT(GPTConfig(**SIZES)).generate(tokens(1, 2), 1, **options)


def test_learned_positions_refuse_longer_input_with_both_numbers():
    model = GPT(GPTConfig(**SIZES, positions="learned"))
    with pytest.raises(ConfigurationError, match=r"the input has 10 tokens, .* max_length=9"):
        model(tokens(1, 10))


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"num_heads": 5}, ["num_heads=5 does not divide model_dim=12; use one of [1, 2, 3"]),
        ({"num_kv_heads": 4}, ["num_kv_heads=4 does not divide num_heads=6", "[1, 2, 3, 6]"]),
        ({"num_heads": 12, "num_kv_heads": 1}, ["even head dim, but model_dim=12", "is 1"]),
        ({"dropout": 1.0, "vocab_size": 0}, ["2 problems", "dropout=1.0", "vocab_size=0"]),
        ({"norm": "batchnorm"}, ["norm='batchnorm' must be 'rmsnorm' or 'layernorm'"]),
        ({"init_std": 0.0}, ["init_std=0.0 must be greater than 0"]),
    ],
)
def test_bad_sizes_are_refused_with_their_numbers(changes: dict, texts: list[str]):
    with pytest.raises(ConfigurationError) as error:
        GPTConfig(**{**SIZES, **changes})
    assert all(text in str(error.value) for text in texts), str(error.value)


def test_unknown_preset_and_field_name_the_nearest():
    text = r"2 problems.*'gpt2-medum'.*did you mean 'gpt2-medium'.*did you mean 'num_layers'"
    with pytest.raises(ConfigurationError, match=re.compile(text, re.DOTALL)):
        GPTConfig.preset("gpt2-medum", num_layer=3)


def test_logits_equal_those_of_transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 9, "n_embd": 12, "n_layer": 2, "n_head": 3}
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = GPT(GPTConfig(**{**SIZES, "num_heads": 3, "ff_dim": 48}, **STYLES["learned"])).eval()

    def turn(weight: torch.Tensor) -> torch.Tensor:
        return weight.mT if weight.ndim == 2 else weight

    source = reference.transformer.state_dict()
    weights = {"embed.weight": source["wte.weight"], "position.weight": source["wpe.weight"]}
    for kind in ("weight", "bias"):
        weights[f"norm.{kind}"] = source[f"ln_f.{kind}"]
        for i in range(2):
            old, new = f"h.{i}.", f"blocks.{i}."
            weights[f"{new}attention_norm.{kind}"] = source[f"{old}ln_1.{kind}"]
            weights[f"{new}mlp_norm.{kind}"] = source[f"{old}ln_2.{kind}"]
            parts = source[f"{old}attn.c_attn.{kind}"].chunk(3, dim=-1)
            names = {"query": parts[0], "key": parts[1], "value": parts[2]}
            names["out"] = source[f"{old}attn.c_proj.{kind}"]
            weights.update({f"{new}attention.{n}.{kind}": turn(w) for n, w in names.items()})
            weights[f"{new}mlp.up.{kind}"] = turn(source[f"{old}mlp.c_fc.{kind}"])
            weights[f"{new}mlp.down.{kind}"] = turn(source[f"{old}mlp.c_proj.{kind}"])
    weights["head.weight"] = weights["embed.weight"]
    ours.load_state_dict(weights)
    ids = tokens(2, 7)
    torch.testing.assert_close(ours(ids), reference(ids).logits, rtol=1e-5, atol=1e-5)


def test_logits_equal_those_of_transformers_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        max_position_embeddings=9,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=15,
        rms_norm_eps=1e-5,
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names = {
        "model.embed_tokens": "embed",
        "model.layers": "blocks",
        "model.norm": "norm",
        "lm_head": "head",
        "self_attn": "attention",
        "post_attention_layernorm": "mlp_norm",
        "input_layernorm": "attention_norm",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "out",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    weights = {}
    for name, weight in reference.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = weight
    ours = GPT(GPTConfig(**SIZES, tied_head=False)).eval()
    ours.load_state_dict(weights)
    ids = tokens(2, 7)
    torch.testing.assert_close(ours(ids), reference(ids).logits, rtol=1e-5, atol=1e-5)
