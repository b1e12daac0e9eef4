"""Families of transformers whose sequences are divided, each for what it does with tokens."""

from typing import Any

import pytest
import torch
import transformers

from tests.distributed.user_code.test_families import Family
from tests.support.user_code import Cases

CASES = Cases(__name__)
LENGTH, PADDING, V = 16, 1, 48
HEAD = LENGTH // 2  # as many features as a rank has tokens
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), 4 * HEAD),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    "decoder_attention_heads": 4,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "is_decoder": True,
}


def tokens(*, padded: bool = True) -> list[dict[str, Any]]:
    """Return rows with padding on the right or on the left, and labels that begin at any place."""
    rows = torch.randint(3, V, (32, LENGTH))
    labels = rows.clone()
    for place, row in enumerate(rows):
        if place % 4 == 1 and padded:
            row[LENGTH - place % 7 :] = PADDING
        if place % 4 == 2 and padded:
            row[: place % 5] = PADDING
        labels[place, : place % 6] = -100
    labels[rows == PADDING] = -100
    return [
        {"input_ids": row, "labels": label, "attention_mask": (row != PADDING).long()}
        for row, label in zip(rows, labels, strict=True)
    ]


def causal(name: str, family: str, **cells: Any) -> None:
    """Add a case: a causal language model of a family."""
    options, padded = cells.pop("config", {}), cells.pop("padded", True)

    def make() -> tuple[Any, Any]:
        config = transformers.CONFIG_MAPPING[family](**{**_SIZES, **options})
        return Family(transformers.AutoModelForCausalLM.from_config(config)), tokens(padded=padded)

    make.__name__ = name
    CASES.add(**{"tolerance": 1e-6, **cells})(make)


causal("norms_of_heads_as_large_as_the_tokens_of_a_rank", "apertus", equal="cp2")
causal("positions_counted_from_the_padding_index", "roberta", equal="cp2", large="zero3 cp2pp2")
causal("positions_counted_by_an_embedding", "bart", equal="cp2", large="zero3 cp2pp2")
causal("positions_from_a_shape", "blenderbot", equal="cp2")
causal("a_loss_by_default", "bert-generation", equal="cp2 zero3", large="pp2")
# Of a padding token that sees nothing but its sink, transformers computes NaN.
_SINKS = {"config": {"num_key_value_heads": 2, "sliding_window": 4}, "padded": False}
causal("sinks_of_heads", "granite_swa", equal="cp2", large="tp2", **_SINKS)
causal(
    "sinks_of_heads_that_are_exchanged",
    "granite_swa",
    equal="cp2",
    **_SINKS,
    strategy={"context_options": {"method": "ulysses"}},
)
causal(
    "state_spaces_without_attention",
    "mamba2",
    equal="cp2",
    config={"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    tolerance=1e-5,  # which transformers computes in float32
)
causal(
    "short_convolutions_beside_attention",
    "lfm2",
    equal="cp2",
    large="cp2pp2 cp2tp2",
    config={"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
)
causal(
    "delta_rules_beside_attention",
    "qwen3_next",
    equal="cp2",
    large="cp2tp2",
    config={
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8),
        **dict.fromkeys(("linear_num_key_heads", "num_key_value_heads"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **dict.fromkeys(("linear_num_value_heads", "num_experts"), 4),
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    tolerance=1e-5,  # which transformers computes in float32
)
causal("tokens_chosen_over_the_whole_sequence", "deepseek_v32", refused={"cp2": "by an indexer"})
causal("masks_of_its_own", "doge", refused={"cp2": "mask of its own"})


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
