"""Families of transformers, as their users train them: derived plans make them equal, or refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.support.models.plain_language_model import PlainModule
from tests.support.user_code import Cases

CASES = Cases(__name__)
_V = 48
_OFF = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"), 0.0
)
_SIZES: dict[str, Any] = {
    **_OFF,
    "vocab_size": _V,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH: dict[str, Any] = {
    "vocab_size": _V,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "dropout": 0.0,
}
_IMAGES: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 8, "num_labels": 3}
_SOUNDS: dict[str, Any] = {
    **{k: v for k, v in _SIZES.items() if k != "max_position_embeddings"},
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


class Family(PlainModule):
    """Trains a model of transformers on its own loss; the plan is derived."""

    lr = 0.1
    parallel_plan = None  # type: ignore[assignment]

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)

    def loss(self, batch: Any) -> Any:
        return self.net(**batch).loss


def tokens(count: int = 32, length: int = 8) -> list[Any]:
    rows = torch.randint(3, _V, (count, length))
    return [{"input_ids": row, "labels": row} for row in rows]


def pairs() -> list[Any]:
    rows = tokens()
    return [{"input_ids": torch.randint(3, _V, (10,)), "labels": row["labels"]} for row in rows]


def images() -> list[Any]:
    labels = torch.randint(3, (32,))
    return [{"pixel_values": torch.randn(3, 16, 16), "labels": label} for label in labels]


def sounds() -> list[Any]:
    labels = torch.randint(3, (32,))
    return [{"input_values": torch.randn(160), "labels": label} for label in labels]


def family(
    name: str, kind: str, config: Any, samples: Callable[[], Any], **cells: Any
) -> Callable[[], Any]:
    def make() -> Any:
        auto = getattr(transformers, kind)
        return Family(auto.from_config(config) if "Auto" in kind else auto(config)), samples()

    make.__name__ = name
    return CASES.add(**cells)(make)


_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_PAIRS, _IMAGE = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"

family(
    "t5",
    _PAIRS,
    transformers.T5Config(
        vocab_size=_V,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    pairs,
    equal="tp2 pp2",
    large="tp2pp2",
)
family("bart", _PAIRS, transformers.BartConfig(**_BOTH), pairs, equal="pp2")
family("marian", _PAIRS, transformers.MarianConfig(**_BOTH), pairs, equal="tp2")
family(
    "norm_defined_before_the_blocks",
    _CAUSAL,
    transformers.OPTConfig(**_SIZES, ffn_dim=40),
    tokens,
    equal="tp2 pp2",
)
family(
    "weights_read_by_the_module_around",
    _CAUSAL,
    transformers.MambaConfig(
        vocab_size=_V, hidden_size=32, num_hidden_layers=4, state_size=4, use_mambapy=False
    ),
    tokens,
    equal="tp2",
    tolerance=1e-6,
)
family(
    "weights_read_in_another_dtype",
    _CAUSAL,
    transformers.LongcatFlashConfig(
        **{k: v for k, v in _SIZES.items() if k not in ("num_hidden_layers", "intermediate_size")},
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
        num_layers=2,
        ffn_hidden_size=40,
        expert_ffn_hidden_size=16,
        n_routed_experts=16,  # as many as a head of its size is divided for
        zero_expert_num=2,
        moe_topk=2,
        experts_implementation="eager",
    ),
    tokens,
    equal="tp2",
    large="tp2pp2",
    tolerance=1e-6,
)
family(
    "attention_type_of_a_block",
    _MASKED,
    transformers.ModernBertConfig(
        **{k: v for k, v in _SIZES.items() if k not in _OFF},
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    tokens,
    equal="pp2",
    tolerance=1e-6,
)
family("images", _IMAGE, transformers.ViTConfig(**_IMAGES), images, equal="tp2 pp2")
family(
    "hidden_states_of_all_blocks",
    "Wav2Vec2ForSequenceClassification",
    transformers.Wav2Vec2Config(**_SOUNDS, use_weighted_layer_sum=True, num_labels=3),
    sounds,
    equal="tp2 pp2 zero3",
)
family(
    "norm_after_the_blocks",
    "Wav2Vec2ForSequenceClassification",
    transformers.Wav2Vec2Config(**_SOUNDS, do_stable_layer_norm=True, num_labels=3),
    sounds,
    equal="pp2",
)
family(
    "latents_of_keys_and_values",
    _CAUSAL,
    transformers.DeepseekV2Config(
        **_SIZES,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        experts_implementation="eager",
    ),
    tokens,
    equal="tp2 tp2pp2",
    large="tp2_whole_sequence",
    tolerance=1e-6,
)
family(
    "sinks_of_heads",
    _CAUSAL,
    transformers.CONFIG_MAPPING["granite_swa"](**_SIZES, num_key_value_heads=2, sliding_window=4),
    tokens,
    equal="tp2",
    large="tp2pp2",
    tolerance=1e-6,
)
family(
    "gathered_attention_beside_a_paired_mlp",
    _CAUSAL,
    transformers.Olmo2Config(**_SIZES),
    tokens,
    equal="tp2",
    large="tp2pp2",
    tolerance=1e-6,
)
family(
    "router_losses",
    _CAUSAL,
    transformers.MixtralConfig(
        **_SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    ),
    tokens,
    equal="pp2_one_microbatch zero3",
    refused={"pp2 cp2": "auxiliary loss of its routers, a product of means"},
    trainer={"precision": "32-true"},
    tolerance=1e-4,
)
family(
    "batch_statistics",
    _IMAGE,
    transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    ),
    images,
    equal="pp2_one_microbatch",
    refused={"pp2 zero3": "normalizes with statistics over the batch"},
    tolerance=1e-6,
)


@CASES.add(
    equal="tp2 pp2_one_microbatch", refused={"pp2 zero3": "compares every sample of a batch"}
)
def pairs_of_images_and_texts() -> Any:
    class Module(Family):
        def loss(self, batch: Any) -> Any:
            return self.net(**batch, return_loss=True).loss

    text = {**_SIZES, "projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config={**_IMAGES, "vocab_size": 0})
    samples = [
        {"input_ids": row["input_ids"], "pixel_values": image["pixel_values"]}
        for row, image in zip(tokens(), images(), strict=True)
    ]
    return Module(transformers.CLIPModel(config)), samples


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
