"""Whatever a user gets wrong about divided sequences is said in one clear error."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, Tensor

from lightning_par import Hybrid3DStrategy, SequenceRingStrategy
from lightning_par.engine.context.options import ContextOptions
from lightning_par.errors import ConfigurationError, MeshError, PlanError
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
from tests.support.faults.user_mistakes import Case, fit, planned
from tests.support.models.toy_gpt import ToyLM, ToyModule
from tests.support.ranks.api import RankError, run_ranks

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore")]

CP2 = {"context_parallel_size": 2, "tp": 1, "pp": 1}
TOY = ToyLM().parallel_plan()


def replanned(**changes: Any) -> Any:
    return planned(**changes)


def with_batch(**changes: Any) -> Any:
    return replanned(batch=replace(TOY.batch, **changes))


BEFORE = {
    "sizes": Case(
        error=MeshError,
        options={"context_parallel_size": 3},
        says=r"context_parallel_size=3 needs 3 devices or a multiple, but the Trainer has 2",
    ),
    "size of another type": Case(
        error=MeshError,
        options={"context_parallel_size": "all"},
        says=r"context_parallel_size='all' must be a whole number of 1 or more, or 'auto'",
    ),
    "hybrid that does not divide": Case(
        error=ConfigurationError,
        options={**CP2, "context_options": {"method": "hybrid", "ulysses_size": 3}},
        says=r"ulysses_size=3 does not divide context_parallel_size=2\. Use 2\.",
    ),
    "positions that nobody gives": Case(
        error=PlanError,
        options=CP2,
        module=replanned(positions=None),
        says=r"context_parallel_size=2: the plan of \w+ does not say how the model gets",
    ),
    "positions of a module that is not there": Case(
        error=PlanError,
        options=CP2,
        module=replanned(positions={"positon": "positions"}),
        says=r"'model\.positon' matches no module; did you mean 'model\.position'\?",
    ),
    "positions by another name": Case(
        error=PlanError,
        options=CP2,
        module=replanned(positions={"": "position_ids"}),
        says=r"the forward of model has no argument 'position_ids'\. .* are ids, positions\.",
    ),
    "labels without a sequence dim": Case(
        error=PlanError,
        options=CP2,
        module=with_batch(sequence_dims={"ids": 1}),
        says=r"the plan gives no sequence dim for the labels 'labels', so the losses",
    ),
    "no labels": Case(
        error=PlanError,
        options=CP2,
        module=with_batch(labels=None),
        says=r"the plan does not say which batch entry holds the labels, so the",
    ),
    "labels that the model shifts": Case(
        error=PlanError,
        options=CP2,
        module=with_batch(label_shift=1),
        says=r"label_shift=1, so the model itself shifts the labels.*Shift the labels in the data",
    ),
    "no blocks": Case(
        error=PlanError,
        options=CP2,
        module=replanned(blocks=None),
        says=r"context_parallel_size=2: the plan of \w+ does not say which modules",
    ),
    "compiled blocks": Case(
        error=ConfigurationError,
        options={**CP2, "compile_blocks": True},
        says=r"compile_blocks=True is not supported with context_parallel_size=2",
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_mistake_is_refused_before_processes_start(name: str) -> None:
    case = BEFORE[name]
    with pytest.raises(case.error, match=case.says):
        fit(case)


OPTIONS = {
    "method": ({"method": "rings"}, r"method='rings' must be 'ring', 'ulysses' or 'hybrid'"),
    "layout": ({"layout": "zig"}, r"layout='zig' must be 'zigzag' or 'contiguous'"),
    "route": ({"route": 3}, r"route=3 must be 'direct' or 'ring'"),
    "hybrid without a size": (
        {"method": "hybrid"},
        r"ulysses_size=None must be a whole number of 2 or more with method='hybrid'",
    ),
    "size without hybrid": (
        {"ulysses_size": 2},
        r"ulysses_size=2 needs method='hybrid': with method='ring' the number",
    ),
    "unknown backend": (
        {"attention_backend": "aten_cuda"},
        r"attention_backend='aten_cuda' must be auto, .*; did you mean 'aten_\w+'\?",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_without_such_a_value_is_refused(name: str) -> None:
    given, says = OPTIONS[name]
    with pytest.raises(ConfigurationError, match=says):
        SequenceRingStrategy(**given)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is not missing")
def test_backend_that_is_missing_names_those_that_work() -> None:
    says = r"attention_backend='aten_flash' needs a CUDA device\. Use auto, aten_cpu or eager\."
    with pytest.raises(ConfigurationError, match=says):
        SequenceRingStrategy(attention_backend="aten_flash")


def test_context_options_name_the_nearest_field() -> None:
    says = (
        r"context_options has no field 'metod'\. Its fields are method.*; did you mean 'method'\?"
    )
    with pytest.raises(ConfigurationError, match=says):
        Hybrid3DStrategy(context_options={"metod": "ring"})


def test_unknown_option_names_those_of_all_classes() -> None:
    with pytest.raises(
        TypeError, match=r"'zero_stag' \(did you mean 'zero_stage'\?\).*ulysses_size"
    ):
        SequenceRingStrategy(zero_stag=1)


class Mixing(nn.Module):
    """A block that attends in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.whole = way, nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 12)).transpose(1, 2)
        tokens = x.shape[1]
        ways = {
            "dropout": lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
            "mask of pairs": lambda: F.scaled_dot_product_attention(
                q, q, q, attn_mask=torch.ones(tokens, tokens, dtype=torch.bool)
            ),
            "weights": lambda: F.scaled_dot_product_attention(
                q, q, q, attn_mask=torch.full((1, 1, 1, tokens), 0.5)
            ),
            "memory": lambda: F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2]),
            "by hand": lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q,
        }
        if self.way == "module":
            return x + self.whole(x, x, x, need_weights=False)[0]
        return x + ways[self.way]().transpose(1, 2).flatten(2)


class Model(ToyLM):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixing(way)])

    def parallel_plan(self) -> ParallelPlan:
        batch = BatchLayout(sequence_dims={"ids": 1, "labels": 1}, labels="labels")
        return ParallelPlan(blocks="blocks", batch=batch, positions={"": "positions"})


class Mixed(ToyModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = Model(way)


class Forward(ToyModule):
    """Calls the forward of its model, so that no hook runs."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.model.forward(batch["ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


DURING = {
    "dropout": r"dropout_p=0\.1 of attention probabilities is not supported with context_parallel",
    "mask of pairs": r"attn_mask of shape \(6, 6\) with is_causal=False.*\[B, 1, 1, 6\]",
    "weights": r"attn_mask contains numbers other than 0 and minus infinity",
    "memory": r"combines tokens of a sequence with __getitem__, .* the 6 tokens of one rank",
    "by hand": r"tokens of a sequence with softmax, .* call F.scaled_dot_product_attention",
    "module": r"nn\.MultiheadAttention cannot be divided over context_parallel_size=2",
    "forward": r"names 'model', but no module of that name was called",
}


def try_rank(rank: int, world: int, way: str) -> None:
    module = Forward if way == "forward" else lambda: Mixed(way)
    fit(Case(error=ConfigurationError, says="", options=CP2, module=module))


@pytest.mark.parametrize("way", DURING)
def test_attention_that_cannot_be_divided_is_refused_on_every_rank(way: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(try_rank, 2, way)
    text = str(caught.value)
    assert re.search(DURING[way], text.replace("\n", " ")), text
    assert "hang" not in text
    assert len(re.findall(r"ConfigurationError", text)) >= 2


def test_heads_that_cannot_be_exchanged_name_what_can() -> None:
    run_ranks(exchange, 4)


def exchange(rank: int, world: int) -> None:
    from tests.support.attention_reference import make_axis

    axis = make_axis(world, method="ulysses")
    axis.set_length(16)
    x = torch.zeros(1, 6, 4, 8)
    says = r"6 query and 6 key/value heads cannot be exchanged among 4 ranks.*ulysses_size=2"
    with pytest.raises(ConfigurationError, match=says):
        axis.attend(x, x, x)


def test_options_are_a_value() -> None:
    assert ContextOptions() == ContextOptions(method="ring")
    assert ContextOptions(method="ulysses").ulysses(4) == 4
