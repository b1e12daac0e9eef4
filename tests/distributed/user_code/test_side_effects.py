"""Blocks that leave something behind besides their output, and modules defined out of order."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import ParallelPlan
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


@CASES.add(equal="zero3")
def auxiliary_loss_on_an_attribute() -> Any:
    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            self.aux = out.square().mean()
            return out

    class Module(PlainModule):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) + 0.1 * sum(b.aux for b in self.net.blocks)

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="net.blocks", batch=self.batch)

    net = PlainNet()
    net.blocks = nn.ModuleList(Block(block) for block in net.blocks)
    return Module(net), token_pairs()


@CASES.add(equal="pp2")
def auxiliary_loss_that_is_carried() -> Any:
    module, samples = auxiliary_loss_on_an_attribute()
    plan = module.parallel_plan()
    module.parallel_plan = lambda: replace(plan, carried=("aux",))
    return module, samples


@CASES.add(equal="zero3", refused={"pp2": r"net.head is used after the blocks.*last="})
def head_defined_before_the_blocks() -> Any:
    class Net(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            children = self._modules
            self._modules = {n: children[n] for n in ("head", "emb", "blocks", "norm")}

    return PlainModule(Net()), token_pairs()


@CASES.add(equal="pp2")
def head_defined_before_the_blocks_and_declared() -> Any:
    module, samples = head_defined_before_the_blocks()
    plan = replace(module.parallel_plan(), last=("net.head",))
    module.parallel_plan = lambda: plan
    return module, samples


def with_styles(**changes: Any) -> Any:
    module = PlainModule()
    plan = module.parallel_plan()
    styles = {**plan.tensor, **{f"net.{k.replace('__', '.')}": v for k, v in changes.items()}}
    module.parallel_plan = lambda: replace(plan, tensor=styles)  # type: ignore[method-assign]
    return module, token_pairs()


@CASES.add(refused={"tp2 tp2_whole_sequence": "net.head is 'colwise', but no module around it"})
def colwise_behind_a_gathered_norm() -> Any:
    return with_styles(norm="sequence_gather_output", head="colwise")


@CASES.add(equal="tp2 tp2_whole_sequence")
def colwise_gathered_behind_a_gathered_norm() -> Any:
    return with_styles(norm="sequence_parallel", head="colwise_gather_output")


@CASES.add(refused={"tp2": r"net\.head.* mixes a plain tensor with a weight"})
def weights_read_by_the_module_around() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias)

    net = PlainNet()
    net.head = Tied()  # type: ignore[assignment]
    module = PlainModule(net)
    plan = module.parallel_plan()
    styles = {k: v for k, v in plan.tensor.items() if k != "net.head"}
    styles |= {"net.norm": "sequence_gather_output", "net.head.inner": "colwise_gather_output"}
    module.parallel_plan = lambda: replace(plan, tensor=styles)  # type: ignore[method-assign]
    return module, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
