"""What a trace tells of a model without a configuration: as much as the configuration would."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from lightning_par import ParallelPlan
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.engine.memory.placement import find_placements
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.inference.infer import infer_plan
from lightning_par.inference.lookup import find_plan
from lightning_par.models import GPTModule, MixtralModule
from lightning_par.observe import recorder as tracing
from lightning_par.observe.flops import FlopCounter
from lightning_par.observe.live_bytes import LiveBytes, PARAMETERS
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.planner.block_trace import shape_of, trace_shape
from lightning_par.planner.constants import Calibration, Constants
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model_parts import TracedShape
from lightning_par.planner.operations import Clock
from lightning_par.planner.part_cost import PartCosts
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout
from lightning_par.sizes import ParallelSizes
from tests.distributed.experts.test_transformers import model as mixture_of
from tests.distributed.user_code.test_families import Family, tokens
from tests.support.models.user_encoders import labeled_rows, LoggedEncoder, TorchEncoder

DEVICE = load_profile("h100")
LENGTH = 1024


def plan_of(module: nn.Module, example: Any = None) -> ParallelPlan:
    return find_plan(module) or infer_plan(module, example=example)


def traced(module: nn.Module, example: Any) -> TracedShape:
    return trace_shape(module, plan_of(module, example), example)


def forecast(shape: Any, layout: Layout) -> Any:
    code = implementation("bf16-mixed", DEVICE)
    return Planner(shape=shape, device=DEVICE, code=code).predict(layout)


LAYOUTS = [
    Layout(sizes=ParallelSizes(**sizes), micro_batch=2, microbatches=4, recompute=again)
    for sizes in ({}, {"tensor": 2, "pipeline": 2}, {"data_shard": 8, "tensor": 4})
    for again in ("none", "selective", "full")
]


@pytest.mark.parametrize(
    ("preset", "chunked", "of_time", "of_memory"),
    [
        ("gpt3-13b", False, 0.03, 0.03),
        ("gpt3-13b", True, 0.03, 0.03),
        ("llama2-7b", False, 0.16, 0.05),
    ],
    ids=[
        "gpt",
        "logits in chunks",
        "rotary positions, which a configuration's forecast leaves out",
    ],
)
def test_a_hidden_configuration_gives_the_same_forecast(
    preset: str, chunked: bool, of_time: float, of_memory: float
) -> None:
    module = GPTModule(preset=preset, overrides={"num_layers": 4, "chunked_loss": chunked})
    with record_construction():
        module.configure_model()
    rows = torch.zeros(2, LENGTH, dtype=torch.long)
    example = {"input_ids": rows, "labels": rows}
    given = {"plan": lambda: plan_of(module), "example": lambda: example}
    wanted = shape_of(module, LENGTH, **given)
    assert not isinstance(wanted, TracedShape)
    config = module.model.config
    module.config = module.model.config = SimpleNamespace(
        max_length=LENGTH,
        positions=config.positions,
        activation=config.activation,
        tied_head=config.tied_head,
        chunked_loss=chunked,
    )
    found = shape_of(module, LENGTH, **given)
    assert isinstance(found, TracedShape)
    assert found.chunked_loss == wanted.chunked_loss == chunked
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.flops(3) == pytest.approx(wanted.flops(3), rel=1e-9)
    assert found.shared_weights(2) == wanted.shared_weights(2)
    assert [t for t in (2, 4, 8) if found.divides(t)] == [t for t in (2, 4, 8) if wanted.divides(t)]
    for layout in LAYOUTS:
        ours, theirs = forecast(found, layout), forecast(wanted, layout)
        assert ours.time.seconds == pytest.approx(theirs.time.seconds, rel=of_time), layout
        assert ours.memory.peak == pytest.approx(theirs.memory.peak, rel=of_memory), layout
        assert dict(ours.traffic) == pytest.approx(dict(theirs.traffic), rel=0.05), layout
    code, clock = implementation("bf16-mixed", DEVICE), Clock(DEVICE, Constants())
    apart, fused = (
        [PartCosts(s, LAYOUTS[0], c, clock).weight_compute for s in (found, wanted)]
        for c in (code, replace(code, fused_accumulation=True))
    )
    assert fused[0] < 0.98 * apart[0]
    assert fused == pytest.approx([fused[1]] * 2, rel=0.04)


def test_flops_and_weights_are_those_of_the_step() -> None:
    """The FLOP counter and autograd count the same of a real step."""
    rows = torch.utils.data.default_collate(labeled_rows(3))
    module = LoggedEncoder()
    shape = traced(module, rows)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with FlopCounter() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module.log = lambda *_, **__: None  # type: ignore[method-assign]
        module.training_step(rows, 0).backward()
    assert shape.flops(3) == counter.model
    floats = [t for p, t in kept.items() if p not in held and t.is_floating_point()]
    parts = [shape.before, *shape.blocks, shape.after]
    saved = 3 * sum(part.saved.total for part in parts)
    assert saved == pytest.approx(sum(t.numel() for t in floats), rel=0.02)
    assert len({id(block) for block in shape.blocks}) == 1 < shape.layers == 4
    assert shape.tensor_degrees == (1, 2, 4, 8, 16, 32, 64)


def test_what_torch_leaves_whole_is_computed_on_every_tensor_rank() -> None:
    """Torch's own attention is not divided, its two linear layers are."""
    shape = traced(TorchEncoder(), torch.utils.data.default_collate(labeled_rows(2)))
    (block,) = {id(b): b for b in shape.blocks}.values()
    divided = [product.divided for product in block.products]
    assert divided == ["nothing", "nothing", "columns", "inner"]
    assert [(a.heads, a.queries, a.width, a.cut) for a in block.attentions] == [(4, 16, 8, "whole")]
    assert (shape.layers, shape.length, shape.model_dim) == (3, 16, 32)


def live_peak(module: Any, batch: Any) -> int:
    """Return the most bytes of tensors in the second step of Adam."""
    module.log = lambda *_, **__: None
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    for _ in range(2):
        with LiveBytes(besides=batch) as live:
            states = [list(state.values()) for state in optimizer.state.values()]
            live.mark([*module.parameters(), states], PARAMETERS)
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
        optimizer.step()
    return live.peak


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    found, batch = {}, torch.utils.data.default_collate(labeled_rows(4))
    for frozen in (False, True):
        module = TorchEncoder(width=256)
        module.encoder.requires_grad_(not frozen)
        module.encoder.layers[0].norm1.requires_grad_(True)
        plan = plan_of(module, batch)
        given = {"plan": lambda p=plan: p, "example": lambda: batch}
        shape = shape_of(module, **given)
        code = implementation("32-true", DEVICE)
        memory = predict_memory(shape, Layout(micro_batch=4), code)
        assert memory.peak == pytest.approx(live_peak(module, batch), rel=0.1), frozen
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        assert memory.ranks[0]["states"] == pytest.approx(8 * trained)
        assert memory.ranks[0]["gradients"] == pytest.approx(4 * trained)
        time = Planner(shape=shape, device=DEVICE, code=code).predict(Layout(micro_batch=512)).time
        found[frozen] = memory.peak, time.seconds
    assert found[True][0] < 0.5 * found[False][0]
    assert found[True][1] < 0.9 * found[False][1]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Written(nn.Module):
    """A model whose element-wise operators are few enough to be counted by hand."""

    def __init__(self, V: int, D: int, F: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.blocks = nn.ModuleList(
            Residual(nn.Linear(D, F), nn.SiLU(), nn.Linear(F, D)) for _ in range(2)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.table(batch["ids"])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["ids"].flatten())


@pytest.mark.parametrize("on_meta", [False, True])
def test_eager_operators_move_what_a_hand_counts_forward_and_backward(
    on_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_meta:
        monkeypatch.setattr(tracing, "_RUN", 0)
    V, D, F, T, samples = 19, 5, 7, 3, 2
    ids = {"ids": torch.arange(samples * T).reshape(samples, T)}
    plan = ParallelPlan(blocks="blocks")
    shape = trace_shape(Written(V, D, F), plan, ids, backward=True)
    block = shape.blocks[0]
    assert block == shape.blocks[1]
    # SiLU reads and writes; the residual sum reads two.
    assert block.eager.total == 2 * T * F + 3 * T * D
    # SiLU reads two; each bias sums its gradient; those of both paths of the residual are summed.
    assert block.eager_backward.total == 3 * T * F + T * (F + D) + 3 * T * D
    assert block.eager_weights.total == F + D
    assert block.operators == (2, 4)
    # Rows and 64-bit indices are read, rows are written; the gradient has the size of the table.
    assert shape.before.eager.total == 2 * T * D + 2 * T
    assert shape.before.eager_backward.total == T * D + 2 * T
    assert shape.before.eager_weights.total == V * D
    # Softmax 2 and 3; the loss of the labels writes one; and what has a few numbers in all.
    assert shape.after.eager.total == pytest.approx(2 * T * V, abs=2 * T + 4)
    assert shape.after.eager_backward.total == pytest.approx(4 * T * V, abs=2 * T + 4)
    code, layout = implementation("32-true", DEVICE), Layout(micro_batch=3)
    slow, fast = (
        PartCosts(shape, layout, code, Clock(replace(DEVICE, calibration=one), Constants(), 4))
        for one in (
            Calibration(constants=Constants(), attention_rates=(1, 1), eager=rate)
            for rate in (1, 2)
        )
    )
    assert slow.forward.compute - fast.forward.compute == pytest.approx(
        3 * 4 * block.eager.total / 2
    )
    moved = 3 * block.eager_backward.total + block.eager_weights.total
    assert slow.backward.compute - fast.backward.compute == pytest.approx(4 * moved / 2)
    forward = trace_shape(Written(V, D, F), plan, ids).blocks[0]
    assert (forward.operators, forward.eager.total) == ((0, 0), 0)
    assert forward.flops == block.flops


class Uneven(nn.Module):
    """Blocks of which the last takes as long as the four others."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (512, 512, 512, 512, 2048)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(512, n), nn.ReLU(), nn.Linear(n, 512)) for n in sizes)
        )
        self.example_input_array = torch.zeros(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_unequal_blocks_are_cut_by_their_traced_cost() -> None:
    model = Uneven()
    shape = trace_shape(model, ParallelPlan(blocks="blocks"), None)
    assert shape.blocks[1] is shape.blocks[2] is not shape.blocks[4]
    planner = Planner(shape=shape, device=DEVICE)
    layout = Layout(sizes=ParallelSizes(pipeline=2), micro_batch=2**16, microbatches=8)
    assert planner.cut(layout).blocks == (4, 1)
    even = planner.predict(layout)
    cut = planner.predict(planner.cut(layout))
    assert cut.time.seconds < 0.9 * even.time.seconds
    weights = [r["weights"] for r in cut.memory.ranks]
    assert weights[0] == pytest.approx(weights[1], rel=0.01)
    assert sum(weights) == 2 * sum(p.numel() for p in model.parameters())


def test_what_cannot_be_traced_is_refused_with_a_cure() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Bilinear(3, 4, 5)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.inner(left, right)

    with pytest.raises(
        ConfigurationError, match=r"no step of Branching could be traced.*an attribute `con"
    ):
        trace_shape(Branching(), ParallelPlan(), None)
    module = MixtralModule(preset="tiny")
    module.configure_model()
    with pytest.raises(ConfigurationError, match="routes tokens to experts"):
        trace_shape(module, plan_of(module), None)


def test_a_new_tensor_style_is_forecast_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace asks the row what a module of the style gives, and so does the check of a plan."""
    module = GPTModule(preset="tiny")
    with record_construction():
        module.configure_model()
    rows = torch.zeros(2, 16, dtype=torch.long)
    example, plan = {"input_ids": rows, "labels": rows}, plan_of(module)
    wanted = trace_shape(module, plan, example)
    monkeypatch.setitem(TENSOR_STYLES, "mine", TENSOR_STYLES["colwise"])  # type: ignore[arg-type]
    styles: Any = {n: "mine" if s == "colwise" else s for n, s in plan.tensor.items()}
    assert "mine" in styles.values()
    assert trace_shape(module, replace(plan, tensor=styles), example) == wanted
    alone: Any = {n: s for n, s in styles.items() if s != "gather_sequence"}
    with pytest.raises(PlanError, match="is 'mine', but no module that contains it has the style"):
        check_plan(module, replace(plan, tensor=alone), ParallelSizes(tensor=2))


def test_experts_of_transformers_are_divided_over_replicas_and_tensor_ranks() -> None:
    module = Family(mixture_of("qwen3_moe"))
    plan = find_plan(module)
    assert plan is not None
    shape = trace_shape(module, plan, {key: torch.stack([v, v]) for key, v in tokens(1)[0].items()})
    for degrees in ({"expert": 2}, {"tensor": 2}, {"expert": 2, "tensor": 2}):
        sizes = ParallelSizes(data_replicate=2, **degrees)
        resolved = check_plan(module, plan, sizes)
        placed = find_placements(module, resolved, sizes)
        shapes = [p.local_shape(0, sizes) or () for p in placed if ".layers." in p.name]
        held = shape.span_weights(0, shape.layers, sizes.tensor, sizes.expert)
        assert held == sum(map(math.prod, shapes)), degrees
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    found = {(s.tensor, s.expert) for s, _ in LayoutSpace(devices=8, samples=8).sizes(shape)}
    assert {(1, 1), (1, 2), (1, 4), (2, 2)} <= found
    assert not {(1, 8), (2, 4)} & found
