"""Families of transformers, trained three steps on each layout: equal to one process, or not.

    python benchmarks/families.py --layouts tp2 pp2 zero3 cp2 tp2pp2 [--only llama] [--out FILE]

Every causal language model of the installed transformers is made with few and small layers and
random weights; the proof of the first step is off, so that a wrong plan is seen as one. Numbers are
float64, but for what a family computes in float32 whatever its dtype; hence the tolerance.
"""

import argparse
import importlib
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._families_page import ALONE, page_of
from lightning_par.callbacks import CommunicationProfiler
from lightning_par.observe.modes import DoublePrecision
from tests.support.models.plain_language_model import PlainModule
from tests.support.ranks.api import close_ranks, RankError, run_ranks
from tests.support.user_code import Case, LAYOUTS, train_case, world_of

VOCABULARY, LENGTH, TOLERANCE, MOST = 64, 16, 1e-5, 6e5
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("rotary_dim",), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(
        ("index_topk", "mamba_d_state", "state_size", "hidden_size_per_layer_input"), 8
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "activation_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "residual_dropout"),
        0.0,
    ),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_num_heads", "mamba_num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("mamba_dt_rank", "index_block_size", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "swa_head_dim", "ssm_state_size"), 8),
    **dict.fromkeys(("o_groups", "index_topk_blocks", "attn_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "num_dense_layers"), 1),
    **dict.fromkeys(("unpadded_vocab_size",), VOCABULARY),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "sliding_window"), 16),
    **dict.fromkeys(("num_nextn_predict_layers", "pad_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "is_decoder"), 1),
    **dict.fromkeys(("eos_token_id", "mamba_expand"), 2),
    **dict.fromkeys(("d_inner", "dff", "dim_ff", "ffn_hidden_size", "feed_forward_size"), 48),
    **dict.fromkeys(("attention_hidden_size", "embedding_dim", "moe_layer_size"), 32),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "laurel_rank"), 16),
    **dict.fromkeys(("decoder_vocab_size", "pronunciation_vocab_size"), VOCABULARY),
    **dict.fromkeys(("shape_vocab_size",), VOCABULARY),
    **dict.fromkeys(("attention_head_size", "d_head", "dim_head", "position_bias_num_buckets"), 8),
    **dict.fromkeys(("prompt_length", "num_kv_heads"), 2),
    **dict.fromkeys(("decoder_start_token_id",), 3),
    **dict.fromkeys(("resid_pdrop", "attn_pdrop", "local_attention_probs_dropout_prob"), 0.0),
}
"""Field of a configuration, where it has one that is a number -> its size here."""

FILLED = (
    *("head_dim", "num_experts_per_tok", "num_key_value_heads"),
    *("n_routed_experts", "n_shared_experts"),
)
_TWO = ("linear_attention", "full_attention")
_HYBRID = ["linear_attention", "hybrid"]
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "falcon_h1": {"hidden_size": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "hrm_text": {"num_hidden_layers": 2},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [4, 4],
        "is_decoder": True,
        **dict.fromkeys(("local_attn_chunk_length", "lsh_attn_chunk_length"), 8),
        "num_buckets": 2,
    },
    "xlstm": {"num_blocks": 2, "mode": "train", "return_last_states": False, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,  # as `tie_weights_keys` of the model demands
        "layers_block_type": ["linear_attention", *_HYBRID, *_HYBRID, "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID * 2,
        "hidden_size": 32,
        "attention_hidden_size": 64,
        "num_attention_heads": 4,
        "n_mamba_heads": 4,
        **dict.fromkeys(("mamba_d_state", "adapter_rank", "chunk_size"), 8),
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "swa_q_lora_rank"), 16),
        **dict.fromkeys(("swa_kv_lora_rank", "head_dim", "swa_head_dim"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("swa_qk_rope_head_dim", "swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        "shared_experts_intermediate_size": 16,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "granitemoehybrid": {"layer_types": list(_TWO)},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_kv_heads", "indexer_n_heads"), 1),
        **dict.fromkeys(("head_dim", "indexer_head_dim", "indexer_budget"), 8),
        **dict.fromkeys(("indexer_compress_ratio",), 2),
        **dict.fromkeys(("hc_lowrank", "ple_embed_dim"), 8),
    },
}
"""Family -> what its configuration is made of, where a field cannot be set afterwards."""


def small(config: Any, given: Collection[str] = ()) -> Any:
    """Return a configuration with small sizes, and with one layer of every kind that it has.

    Args:
        config: Changed in place.
        given: Fields that are small already.
    """
    for name, size in SIZES.items():
        if name in given:
            continue
        with suppress(Exception):  # a field that follows from others, or differs among the layers
            value = getattr(config, name)
            if isinstance(value, int | float) or (value is None and name in FILLED):
                setattr(config, name, type(value)(size) if value is not None else size)
    with suppress(Exception):  # latents, of which every head makes its own keys
        if hasattr(config, "kv_lora_rank"):
            config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "mlp_only_layers", None):  # of two layers, one has experts
        config.mlp_only_layers = [0]
    for name in {"layer_types", "mlp_layer_types", "layers_block_type"}.difference(given):
        kinds = list(dict.fromkeys(getattr(config, name, None) or ()))
        if kinds and "num_hidden_layers" not in given:
            with suppress(AttributeError):
                config.num_hidden_layers = max(2, len(kinds))
                setattr(config, name, kinds if len(kinds) > 1 else kinds * 2)
    for inner in list(vars(config).values()):
        if hasattr(inner, "to_dict"):
            small(inner)
    return config


class Family(PlainModule):
    """Trains a model of transformers on its own loss; the plan is derived."""

    lr = 0.1
    parallel_plan = None  # type: ignore[assignment]

    def loss(self, batch: Any) -> Any:
        """Return the loss of the model itself."""
        return self.net(**batch).loss


def case_of(family: str) -> Case:
    """Return the case that trains a family."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        given = GIVEN.get(family, {})
        if "layer_types" in given and "num_hidden_layers" not in given:
            given = {**given, "num_hidden_layers": len(given["layer_types"])}
        config = small(CONFIG_MAPPING[family](**given), given)
        with torch.device("meta"):
            entries = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if entries > MOST:
            raise ValueError(f"{entries} entries of parameters: its sizes have other names")
        # torch's product of groups, of the other implementation, takes no float64.
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        rows = torch.randint(3, VOCABULARY, (24, LENGTH))
        labels = rows.clone()
        for place, row in enumerate(labels):  # unequal numbers of labels, as of prompts
            row[: place % 5] = -100
        samples = zip(rows, labels, strict=True)
        return Family(model), [{"input_ids": row, "labels": label} for row, label in samples]

    options = {"max_steps": 3}
    return Case(
        make=make, cells={}, strategy={"verify": False}, trainer=options, tolerance=TOLERANCE
    )


class Sent(CommunicationProfiler):
    """Counts the bytes that this rank sends in the last step over the axis of tensor shards."""

    tensor = 0.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take what was counted."""
        entries = self.recording.steps.last().entries
        self.tensor = sum(entry.sent for entry in entries if entry.axis == "tp")
        self.recording.stop()


def train(rank: int, world: int, family: str, layout: str | None) -> dict[str, Any]:
    """Train a family on a rank; layout None: with a plain Trainer."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with DoublePrecision(), TemporaryDirectory() as folder:
        sent = [Sent(folder=folder)] if layout and "tp2" in layout else []
        found = train_case(case_of(family), layout, rank, world, watches=sent)
    found["sent"] = sum(watch.tensor for watch in sent)
    return found if rank == 0 else {key: found[key] for key in found.keys() & {"refused"}}


def outcome(family: str, layout: str, wanted: dict[str, Any]) -> str:
    """Train a family on a layout; say whether it equals one process."""
    try:
        found = run_ranks(train, world_of(layout), family, layout, timeout=90)[0]
    except RankError as error:
        text = str(error)
        return ("hangs: " if "did not answer" in text else "crashes: ") + text
    if "refused" in found:
        return "refused: " + " ".join(found["refused"].split())
    losses = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True))
    apart = {n: float((w - wanted["weights"][n]).abs().max()) for n, w in found["weights"].items()}
    worst = max(apart, key=lambda name: apart[name])
    if max(losses, apart[worst]) > TOLERANCE:
        return f"DIFFERS: losses by {losses:.1e}, {worst} by {apart[worst]:.1e}"
    return f"equal: {found['sent']:.0f} bytes over tp" if found["sent"] else "equal"


def rows(only: list[str]) -> Iterator[str]:
    """Give the families whose names hold one of some texts."""
    yield from (f for f in sorted(CAUSAL) if not only or any(re.fullmatch(o, f) for o in only))


def merged(files: list[Path]) -> dict[str, dict[str, str]]:
    """Return the outcomes that earlier runs wrote; of a cell in several, the last."""
    table: dict[str, dict[str, str]] = {}
    for file in files:
        for family, cells in json.loads(file.read_text()).items():
            table[family] = {**table.get(family, {}), **cells}
    return table


def missing(family: str, layouts: list[str], known: Collection[str]) -> list[str]:
    """Return the layouts on which a family is to be trained."""
    has_experts = getattr(CONFIG_MAPPING[family], "base_model_ep_plan", None)
    chosen = [layout for layout in layouts if has_experts or "ep2" not in layout]
    return [] if ALONE in known else [layout for layout in chosen if layout not in known]


def main() -> None:
    """Print a line for each cell, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", nargs="+", default=["tp2"], choices=LAYOUTS)
    parser.add_argument("--only", nargs="+", default=[], help="patterns of names")
    parser.add_argument("--out", type=Path, help="JSON: family -> layout -> outcome")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="--out of earlier runs")
    parser.add_argument("--page", type=Path, help="Markdown of the whole table")
    given = parser.parse_args()
    table = merged(given.known)
    for family in rows(given.only):
        cells = table.setdefault(family, {})
        layouts = missing(family, given.layouts, cells)
        if not layouts:
            continue
        try:
            (wanted,) = run_ranks(train, 1, family, None, timeout=90)
        except RankError as error:
            cells[ALONE] = str(error)
            print(family, ALONE, cells[ALONE].partition("\n")[0][:200], flush=True)
            continue
        for layout in layouts:
            start = time.monotonic()
            cells[layout] = outcome(family, layout, wanted)
            seconds = time.monotonic() - start
            shown = cells[layout].partition("\n")[0][:200]
            print(family, layout, shown, f"({seconds:.1f} s)", flush=True)
        if given.out:
            given.out.write_text(json.dumps(table, indent=1))
    counts = Counter((k, v.partition(":")[0]) for cells in table.values() for k, v in cells.items())
    for (layout, kind), count in sorted(counts.items()):
        print(f"{layout:20} {kind:10} {count}")
    if given.page:
        left = {f: missing(f, given.layouts, table.get(f, ())) for f in rows([])}
        given.page.write_text(page_of(table, {f: names for f, names in left.items() if names}))
    close_ranks()


if __name__ == "__main__":
    importlib.import_module("benchmarks.families").main()
