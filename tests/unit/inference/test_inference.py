"""Plans by structure, without processes: what is found, what is refused, and that nothing moves."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, infer_plan, ParallelPlan
from lightning_par.inference.infer import describe_inferred
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes
from tests.support.models import structures
from tests.support.models.structures import LanguageModel, Planless

TOKENS = torch.zeros(2, 12, dtype=torch.long)


def test_separate_heads_are_sharded_with_what_stands_between() -> None:
    plan = infer_plan(LanguageModel(structures.grouped_heads))
    assert plan.blocks == "layers"
    assert plan.last == ("head",)  # it is defined before the blocks
    assert dict(plan.tensor) == {
        "head": "vocab_head",
        "tokens": "vocab_embedding",
        "places": "replicated",
        "layers.*.norm1": "replicated",
        "layers.*.norm2": "replicated",
        "layers.*.attn": "gather_sequence",
        "layers.*.attn.query": "colwise",
        "layers.*.attn.key": "colwise",
        "layers.*.attn.value": "colwise",
        "layers.*.attn.norm": "replicated_with_grad_allreduce",
        "layers.*.attn.out": "rowwise",
        "layers.*.mlp": "gather_sequence",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.gate": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "replicated",
    }
    assert dict(plan.divided) == {"layers.*.attn": ("n_heads", "n_groups")}
    assert plan.positions is None  # so that divided sequences are refused


class NormedTable(nn.Embedding):
    """A table whose norm would get the tokens of one shard only."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(super().forward(ids))


def test_a_table_with_parameters_inside_is_whole() -> None:
    module: Any = LanguageModel(structures.grouped_heads)
    module.tokens = NormedTable(*module.tokens.weight.shape)
    styles = infer_plan(module).tensor
    assert styles["tokens"] == styles["tokens.norm"] == "replicated"


def test_tables_and_masks_may_be_arguments_of_attention() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.qkv, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in "qkv"), nn.Linear(32, 32)

        def forward(self, x: Tensor, cos: Tensor, mask: Tensor) -> Tensor:
            parts = [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.qkv]
            query, key = parts[0] * cos, parts[1] * cos
            out = F.scaled_dot_product_attention(query, key, parts[2], attn_mask=mask)
            return self.out(out.transpose(1, 2).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Rotary() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1])
            mask = torch.where(places[:, None] < places, -1e9, 0.0)
            for layer in self.layers:
                x = layer(x, torch.outer(places, torch.ones(8)).cos(), mask)
            return x

    plan = infer_plan(Net(), example=(torch.zeros(2, 12, 32),))
    assert plan.tensor["layers.*.qkv.*"] == "colwise"
    assert plan.tensor["layers.*.out"] == "rowwise"


def test_submodules_that_blocks_share_have_one_style() -> None:
    model = LanguageModel()
    for layer in model.layers[1:]:
        layer.mlp.up = model.layers[0].mlp.up
    plan = infer_plan(model, example=(TOKENS,))
    resolved = check_plan(model, plan, ParallelSizes(tensor=2, pipeline=2))
    assert resolved.styles["layers.1.mlp.up"] == resolved.styles["layers.0.mlp.up"]


def test_heads_beside_each_other_are_sharded() -> None:
    plan = infer_plan(LanguageModel(structures.fused_by_head))
    assert plan.tensor["layers.*.attn.qkv"] == "colwise"
    assert plan.tensor["layers.*.attn.proj"] == "rowwise"
    assert dict(plan.divided) == {"layers.*.attn": ("num_heads",)}


class _Taught(nn.Module):
    """A model and a copy of it, whose tables and heads are as many rows."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.teacher = net, copy.deepcopy(net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.teacher(x)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("first", ["head", "table"])
def test_a_head_that_is_a_table_is_sharded_with_this_table(first: str, tied: bool) -> None:
    net = LanguageModel(tied=tied) if first == "head" else structures.EncoderOfTorch()
    if tied:
        net.head.weight = net.tokens.weight
    model = _Taught(net)
    plan = infer_plan(model, example=(TOKENS,))
    for part in ("net", "teacher"):
        assert plan.tensor[f"{part}.tokens"] == "vocab_embedding"
        assert plan.tensor[f"{part}.head"] == "vocab_head"
    check_plan(model, plan, ParallelSizes(tensor=2))


def test_stacked_heads_are_gathered() -> None:
    model = LanguageModel(structures.fused_whole_width)
    plan = infer_plan(model)
    assert plan.tensor["layers.*.attn.qkv"] == "colwise_gather_output"
    said = describe_inferred(plan, model)
    assert "outputs of layers.*.attn.qkv, layers.*.attn.proj are gathered" in said
    assert "layers.*.attn.qkv computes query, key and value in one" in said
    assert "attn.proj computes" not in said
    model = LanguageModel(structures.fused_by_head)
    divided = infer_plan(model)
    assert describe_inferred(divided, model) == divided.as_code()
    assert plan.tensor["layers.*.mlp.down"] == "rowwise"
    assert not plan.divided


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_frozen_modules_that_no_step_uses(has_evaluation: bool) -> None:
    class Evaluated(Planless):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Perhaps calls it."""

    model = (Evaluated if has_evaluation else Planless)(LanguageModel())
    model.other = nn.Linear(512, 512).requires_grad_(False)
    plan = infer_plan(model, example=(TOKENS, TOKENS))
    said = describe_inferred(plan, model)
    assert ("other" in plan.replicated) == has_evaluation
    note = r"stage of a pipeline holds the frozen other \(1.0 MiB\).*Plan\(last=\('other',\)\)"
    assert bool(re.search(note, said, re.DOTALL)) == has_evaluation


def test_layers_that_do_not_divide_stay_whole() -> None:
    plan = infer_plan(LanguageModel(), tensor_parallel_size=3)
    assert "rowwise" not in plan.tensor.values()
    assert plan.tensor["layers.*.mlp.up"] == "replicated"


def test_parameters_that_another_module_reads_stay_whole() -> None:
    plan = infer_plan(structures.EncoderOfTorch(), example=(TOKENS,))
    assert plan.blocks == "encoder.layers"
    assert plan.tensor[""] == "replicated"  # the position table is the model's own
    assert plan.tensor["encoder.layers.*.self_attn"] == "replicated_inside"
    assert plan.tensor["encoder.layers.*.linear1"] == "colwise_alone"
    assert plan.tensor["encoder.layers.*.linear2"] == "rowwise"


def test_a_parameter_that_the_step_has_written_may_be_read_by_another_module() -> None:
    class Reading(LanguageModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(torch.ones(32), self.tokens.weight)

    class Clamping(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net.tokens.weight.data.clamp_(-3, 3)
            return super().training_step(batch, batch_idx)

    plan = infer_plan(Clamping(Reading()), example=(TOKENS, TOKENS))
    assert "net.tokens.weight is read by the forward of net" in plan.refusals["tensor"]


def test_of_nested_containers_the_outer_one_is_cut() -> None:
    plan = infer_plan(structures.StagesOfWindows(), example=(torch.zeros(2, 3, 16, 16),))
    assert plan.blocks == "layers"
    assert not plan.replicated


def test_outputs_that_later_blocks_read_are_kept_and_containers_in_a_row_are_cut_as_one() -> None:
    plan = infer_plan(structures.UNet(), example=(torch.zeros(2, 3, 16, 16),))
    assert plan.blocks == ("down", "middle", "up")
    assert plan.kept == ("down.0", "down.1", "down.2")
    assert not plan.replicated
    skips = infer_plan(structures.Skips(), example=(TOKENS,))
    assert (skips.blocks, skips.kept) == ("layers", ("layers.0",))
    assert skips.sequence_region == "none"


def test_a_step_tells_the_labels_and_allows_sequence_parallelism() -> None:
    plan = infer_plan(Planless(LanguageModel()), example=(TOKENS, TOKENS))
    assert plan.batch == BatchLayout(sequence_dims={"0": 1, "1": 1}, labels="1")
    assert plan.sequence_region == "blocks"
    assert plan.tensor["net.layers.*.norm1"] == "sequence_parallel"


def test_labels_that_the_step_shifts() -> None:
    class Module(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch["ids"]
            out = self.net(ids)[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(out, ids[:, 1:].flatten(), ignore_index=0)

    plan = infer_plan(Module(LanguageModel()), example={"ids": TOKENS})
    layout = BatchLayout(sequence_dims={"ids": 1}, labels="ids", label_shift=1, ignore_index=0)
    assert plan.batch == layout


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (structures.Convolutions(), "BatchNorm2d.* computes statistics over the batch"),
        (nn.Linear(8, 8), "has no list of blocks"),
    ],
)
def test_what_cannot_be_cut_says_why(model: nn.Module, reason: str) -> None:
    given = torch.zeros(2, 8) if isinstance(model, nn.Linear) else torch.zeros(2, 3, 16, 16)
    plan = infer_plan(model, example=(given,))
    with pytest.raises(ValueError, match=reason):
        check_plan(model, plan, ParallelSizes(pipeline=2))


def test_without_an_example_that_fits_everything_is_refused() -> None:
    class Strange(LanguageModel):
        def forward(self, x: Tensor, other: Tensor, third: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + other + third

    model = Strange()
    plan = infer_plan(model)
    for sizes in (ParallelSizes(pipeline=2), ParallelSizes(tensor=2)):
        with pytest.raises(ValueError, match=r"no plan could be inferred for Strange: .*example="):
            check_plan(model, plan, sizes)


def test_attributes_that_a_forward_changes_are_restored() -> None:
    class Counting(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, list[Tensor]()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            self.total += 1
            return super().forward(x)

    model = Counting()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    seen = model.seen
    infer_plan(model)
    assert (model.calls, model.seen) == (0, [])
    assert model.seen is seen
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(m._forward_hooks for m in model.modules())


def test_parameters_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = LanguageModel()
    assert infer_plan(model) == infer_plan(LanguageModel())


def test_a_large_model_is_traced_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_par.observe.recorder._RUN", 0)
    monkeypatch.setattr("lightning_par.observe.recorder._MOST_RUN", 0)
    assert infer_plan(LanguageModel()).blocks == "layers"


def test_code_makes_the_same_plan() -> None:
    plan = infer_plan(Planless(LanguageModel()), example=(TOKENS, TOKENS))
    names = {"ParallelPlan": ParallelPlan, "BatchLayout": BatchLayout}
    assert eval(plan.as_code(), names) == plan
    assert ParallelPlan(blocks="layers").as_code() == 'ParallelPlan(\n    blocks="layers",\n)'


def test_the_model_itself_has_the_empty_pattern() -> None:
    plan = ParallelPlan(tensor={"": "replicated", "norm": "replicated"})
    assert dict(plan.under("net").tensor) == {"net": "replicated", "net.norm": "replicated"}
