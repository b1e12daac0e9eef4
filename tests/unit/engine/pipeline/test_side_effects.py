"""What a block leaves behind besides its output is refused when it first runs on a stage."""

from collections.abc import Callable

import pytest
import torch
from torch import nn, Tensor

from lightning_par import ParallelPlan
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.stage import MicroBatchState, Stage
from lightning_par.errors import PlanError
from lightning_par.plan.resolved_plan import balance_blocks, resolve_plan


class Block(nn.Module):
    def __init__(self, leave: Callable[["Block", Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.leave(self, out)
        return out


class Model(nn.Module):
    def __init__(self, leave: Callable[[Block, Tensor], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(leave) for _ in range(4))
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def first_stage(model: nn.Module, carried: tuple[str, ...] = ()) -> Stage:
    resolved = resolve_plan(model, ParallelPlan(blocks="blocks", carried=carried))
    (stage,) = cut_stages(model, resolved, [0], balance_blocks(resolved, 2))
    return stage


def keep_aux(block: Block, out: Tensor) -> None:
    block.aux = out.mean()


def run(model: nn.Module, stage: Stage) -> MicroBatchState:
    state = MicroBatchState()
    stage.run(state, lambda: model(torch.ones(2, 4)))
    return state


def test_tensor_on_an_attribute_is_refused_unless_carried() -> None:
    model = Model(keep_aux)
    stage = first_stage(model)
    with pytest.raises(PlanError, match=r"blocks.0.aux.*carried=\('aux',\)"):
        run(model, stage)
    model = Model(keep_aux)
    assert "0.aux" in run(model, first_stage(model, ("aux",))).recorded


def test_what_nobody_differentiates_may_stay() -> None:
    model = Model(lambda block, out: setattr(block, "norm", out.detach().norm()))
    run(model, first_stage(model))


def test_list_of_another_module_and_of_a_hook_are_refused() -> None:
    model = Model(lambda block, out: None)
    model.blocks[1].register_forward_hook(lambda m, i, out: model.features.append(out))
    with pytest.raises(PlanError, match=r"in the module\.features"):
        run(model, first_stage(model))
    model, features = Model(lambda block, out: None), list[Tensor]()
    model.blocks[1].linear.register_forward_hook(lambda m, i, out: features.append(out))
    with pytest.raises(PlanError, match=r"a forward hook of blocks\.1\.linear stores"):
        run(model, first_stage(model))


def test_it_looks_only_when_gradients_are_computed() -> None:
    model = Model(keep_aux)
    stage = first_stage(model)
    with torch.no_grad():
        run(model, stage)
    with pytest.raises(PlanError):
        run(model, stage)
