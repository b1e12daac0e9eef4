"""Plans derived from Hugging Face models, and what is refused."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lightning_par.huggingface
from lightning_par.engine.batch import count_valid, sequence_entries, shift_labels
from lightning_par.engine.context.apply import check_context
from lightning_par.engine.experts.apply import check_experts
from lightning_par.errors import PlanError
from lightning_par.huggingface import derive_plan
from lightning_par.inference.lookup import find_plan
from lightning_par.mesh import ParallelSizes
from lightning_par.observe.modes import DoublePrecision
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import check_plan
from tests.support.models.huggingface import FAMILIES, HFModule


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "t5"])
def test_derived_plan_covers_every_parameter_and_fits(family: str) -> None:
    module = HFModule(family)
    plan = find_plan(module)
    assert plan is not None
    assert set(plan.refusals) == ({"microbatches", "context"} if family == "mixtral aux" else set())
    check_plan(module, plan, ParallelSizes(tensor=2, pipeline=3))  # a bare parameter is refused
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert hash(plan) == hash(find_plan(module))


def test_first_label_of_a_row_counts_only_where_the_model_does_not_shift() -> None:
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    counts = {
        family: float(count_valid({"labels": labels}, derive_plan(FAMILIES[family]()).batch))
        for family in ("llama", "gpt2", "bert", "t5")
    }
    assert counts == {"llama": 1, "gpt2": 1, "bert": 3, "t5": 3}
    model, ids = FAMILIES["llama"](), torch.tensor([[5, 6, 3], [7, 3, 3]])
    logits = model(input_ids=ids).logits
    (wanted,) = -logits[0, :1].log_softmax(-1)[:, 6]  # the one target that is left
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, wanted)


def test_modules_beside_the_model_stay_whole() -> None:
    module = HFModule("llama")
    module.probe = nn.Linear(24, 3)
    plan = find_plan(module)
    assert plan is not None
    assert plan.tensor["probe"] == "replicated"
    assert plan.tensor["model.lm_head"] == "vocab_head"
    check_plan(module, plan, ParallelSizes(tensor=2, pipeline=2))


def test_two_models_beside_each_other_have_no_derived_plan() -> None:
    module = nn.ModuleDict({"teacher": FAMILIES["llama"](), "student": FAMILIES["gpt2"]()})
    assert find_plan(module) is None


def test_an_offered_plan_goes_before_the_derived_one() -> None:
    module = HFModule("llama")
    module.parallel_plan = lambda: ParallelPlan(blocks="model.model.layers")
    assert find_plan(module) == ParallelPlan(blocks="model.model.layers")


def refusal(model: nn.Module, sizes: ParallelSizes) -> str:
    with pytest.raises(PlanError) as caught:
        check_plan(model, derive_plan(model), sizes)
    return caught.value.message


def test_encoder_decoder_is_cut_through_both_stacks() -> None:
    model = FAMILIES["t5"]()
    plan = derive_plan(model)
    assert plan.blocks == ("encoder.block", "decoder.block")
    resolved = check_plan(model, plan, ParallelSizes(tensor=2, pipeline=3))
    assert resolved.block_names[1:3] == ("encoder.block.1", "decoder.block.0")
    assert resolved.kept == {1}
    places = {"shared": "first", "encoder.final_layer_norm": "every", "lm_head": "last"}
    assert {fqn: resolved.units[fqn] for fqn in places} == places


def test_order_of_use_goes_before_the_order_of_definition() -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "ffn_dim": 20, "vocab_size": 37}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, num_hidden_layers=2))
    assert derive_plan(model).last == ("model.decoder.final_layer_norm",)


def test_model_without_blocks_is_refused_with_lines_that_work() -> None:
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=0, num_attention_heads=6
    )
    model = transformers.LlamaForCausalLM(config)
    text = refusal(model, ParallelSizes(pipeline=2))
    assert "LlamaForCausalLM has no list of blocks," in text
    lines = text[text.index("    def parallel_plan(self):") :].rstrip()
    source = "class Module:\n" + lines.replace("blocks='...'", "blocks='model.layers'")
    names = {"lightning_par": lightning_par, "dataclasses": dataclasses}
    exec(source, names)
    module = names["Module"]()
    module.model = FAMILIES["llama"]()
    assert module.parallel_plan().blocks == "model.model.layers"
    assert not module.parallel_plan().refusals


@pytest.mark.parametrize(
    ("entry", "unknown", "known"),
    [("mlp.up_proj", "mlp", "self_attn"), ("self_attn.q_norm", "self_attn", "mlp")],
)
def test_a_part_that_is_not_understood_is_gathered_layer_by_layer(
    entry: str, unknown: str, known: str
) -> None:
    """Passed over, a norm of sharded heads would be trained on the gradient of a rank's heads."""
    model = FAMILIES["qwen3"]()
    model.tp_plan = {k: v for k, v in model.tp_plan.items() if entry not in k}
    if entry == "mlp.up_proj":
        model.tp_plan["model.layers.*.mlp.up_proj"] = "packed_rowwise"
    plan = derive_plan(model)
    assert plan.sequence_region == "none"
    first = {"mlp": "up_proj", "self_attn": "q_proj"}
    assert plan.tensor[f"model.layers.0.{unknown}.{first[unknown]}"] == "colwise_gather_output"
    assert plan.tensor[f"model.layers.*.{known}.{first[known]}"] == "colwise"
    norm = plan.tensor.get("model.layers.0.self_attn.q_norm")
    assert norm == ("replicated" if unknown == "self_attn" else None)
    check_plan(model, plan, ParallelSizes(tensor=2, pipeline=2))


def test_a_pair_of_layers_in_two_parts_of_a_block_is_not_torn() -> None:
    """As an adapter on one of the two layers of an MLP does."""
    model = FAMILIES["bert"]()
    for layer in model.bert.encoder.layer:
        layer.output.scale = nn.Linear(2, 2)
    styles = derive_plan(model).tensor
    assert styles["bert.encoder.layer.0.intermediate.dense"] == "colwise_gather_output"
    assert styles["bert.encoder.layer.0.output.dense"] == "colwise_gather_output"
    assert styles["bert.encoder.layer.*.attention.self.query"] == "colwise"


class NormedTable(nn.Embedding):
    """A table with a norm inside, whose gradient no rank with a part of the rows has whole."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


@pytest.mark.parametrize("ties", [False, True])
def test_a_table_with_parameters_inside_is_whole(ties: bool) -> None:
    model: Any = FAMILIES["llama"]()
    table = NormedTable(*model.lm_head.weight.shape)
    model.set_input_embeddings(table)
    if ties:
        model.lm_head.weight = table.weight
    styles = derive_plan(model).tensor
    assert styles["model.embed_tokens"] == styles["model.embed_tokens.norm"] == "replicated"
    assert styles["lm_head"] == ("replicated" if ties else "vocab_head")


def divided(model: nn.Module) -> str:
    with pytest.raises(PlanError) as caught:
        check_context(model, derive_plan(model), 2)
    return str(caught.value)


def test_sequences_are_not_divided_where_the_model_needs_them_whole() -> None:
    text = divided(FAMILIES["mixtral aux"]())
    assert "context_parallel_size=2: MixtralForCausalLM adds an auxiliary loss" in text
    assert "Set output_router_logits=False" in text
    config = transformers.PhimoeConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, sliding_window=5
    )
    text = divided(transformers.PhimoeForCausalLM(config))
    assert "limits attention to sliding_window=5 tokens by its own mask" in text
    config = transformers.Llama4TextConfig(
        vocab_size=37,
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=16,
        intermediate_size_mlp=16,
        attention_chunk_size=5,
    )
    text = divided(transformers.Llama4ForCausalLM(config))
    assert "limits attention to chunks of 5 tokens" in text
    assert "has cross-attention between two lists of blocks" in divided(FAMILIES["t5"]())


def test_shifted_labels_of_a_batch_count_as_they_are() -> None:
    layout = derive_plan(FAMILIES["llama"]()).batch
    labels = torch.tensor([[5, 6, -100], [7, -100, 8]])
    batch = {"input_ids": labels, "labels": labels}
    moved = shift_labels(batch, layout)
    assert moved["shift_labels"].tolist() == [[6, -100, -100], [-100, 8, -100]]
    assert moved["labels"] is moved["shift_labels"]
    assert batch["labels"] is labels
    assert count_valid(batch, layout) == count_valid(moved, layout) == 2
    assert count_valid({**batch, "shift_labels": labels}, layout) == 4
    assert sequence_entries(batch, layout) == {"input_ids": 1, "labels": 1}
    assert list(sequence_entries({**moved, "position_ids": labels}, layout)) == [
        "input_ids",
        "position_ids",
        "labels",
        "shift_labels",
    ]


def test_layers_of_a_model_without_any_plan_are_gathered_one_by_one() -> None:
    config = transformers.OPTConfig(
        vocab_size=37, hidden_size=24, ffn_dim=20, num_hidden_layers=2, num_attention_heads=6
    )
    model = transformers.OPTForCausalLM(config)
    styles = derive_plan(model).tensor
    assert styles["model.decoder.layers.1.self_attn.q_proj"] == "colwise_gather_output"
    assert styles["model.decoder.layers.1.final_layer_norm"] == "replicated"
    assert styles["model.decoder.embed_tokens"] == "vocab_embedding"
    check_plan(model, derive_plan(model), ParallelSizes(tensor=3))


def test_heads_have_to_divide_although_rows_do() -> None:
    text = refusal(FAMILIES["llama"](), ParallelSizes(tensor=4))
    assert "model.model" not in text
    assert "model.layers.0.self_attn (and 2 others) has num_key_value_heads=2, not" in text
    assert "Use tensor_parallel_size=1 or 2" in text


def test_experts_are_named_and_a_weight_that_they_share_is_refused() -> None:
    model, sizes = FAMILIES["mixtral"](), ParallelSizes(data_shard=2, expert=2, tensor=2)
    resolved = check_plan(model, derive_plan(model), sizes)
    assert resolved.plan.experts == ("model.layers.*.mlp.experts",)
    check_experts(model, resolved, sizes)
    wide = ParallelSizes(data_shard=4, expert=4, tensor=2)
    with pytest.raises(PlanError, match=r"4 experts in dim 0, not divisible by 8. Use .*=1 or 2"):
        check_experts(model, resolved, wide)
    model.model.layers[0].mlp.experts.norm = nn.LayerNorm(24)
    with pytest.raises(PlanError, match=r"experts.norm.weight is one weight that all experts"):
        check_experts(model, resolved, sizes)


WITHOUT_TRANSFORMERS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(name)
import lightning.pytorch  # torchmetrics imports transformers where it is installed
for name in [n for n in sys.modules if n.partition(".")[0] == "transformers"]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
from torch import nn
import lightning_par.huggingface
from lightning_par.inference.lookup import find_plan
assert find_plan(nn.Linear(2, 3)) is None
"""


@pytest.mark.exhaustive  # a process of its own takes ten seconds to import
def test_plans_are_looked_for_without_transformers() -> None:
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_double_precision_keeps_float64_and_nothing_else() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    with DoublePrecision():
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == torch.float64
        assert x.softmax(-1, dtype=torch.float32).dtype == torch.float64
        assert x.half().float().dtype == torch.float32
    assert x.float().dtype == torch.float32
