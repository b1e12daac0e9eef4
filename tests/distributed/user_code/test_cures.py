"""The advice of refusals of a pipeline (LP406, LP407), applied to the refused module, is equal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.ranks.api import RankError
from tests.support.user_code import Cases

CASES = Cases(__name__)
REFUSALS: dict[str, str] = {}
"""Name of a case -> pattern of what it is refused with, without the cure."""


class Net(PlainNet):
    """A net whose parts before, around and behind the blocks a case changes."""

    def before(self, x: Tensor) -> Tensor:
        return self.emb(x)

    def call(self, block: nn.Module, h: Tensor) -> Tensor:
        return block(h)

    def behind(self, h: Tensor, x: Tensor) -> Tensor:
        return self.head(self.norm(h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for block in self.blocks:
            h = self.call(block, h)
        return self.behind(h, x)


def advised(refusal: str, **plan: Any) -> Callable[[Callable[[bool], nn.Module]], None]:
    """Add a case without its cure and one with it.

    Args:
        refusal: Pattern of the refusal, which names the cure.
        plan: What the cure adds to the plan.
    """

    def decorate(net: Callable[[bool], nn.Module]) -> None:
        def make(cured: bool) -> Any:
            module = PlainModule(net(cured))
            changed = replace(module.parallel_plan(), tensor={}, **(plan if cured else {}))
            module.parallel_plan = lambda: changed  # type: ignore[method-assign]
            return module, token_pairs()

        def wrong() -> Any:
            return make(False)

        def right() -> Any:
            return make(True)

        wrong.__name__, right.__name__ = net.__name__, f"{net.__name__}_cured"
        REFUSALS[wrong.__name__] = refusal
        CASES.add()(wrong)
        CASES.add(equal="pp2")(right)

    return decorate


class TowerBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(32, 32)  # behind the blocks, hence of the last stage

    def before(self, x: Tensor) -> Tensor:
        return self.tower(self.emb(x))


@advised(r"net\.tower belongs to the last.*first=", first=("net.tower",))
def a_module_behind_the_blocks_used_before_them(cured: bool) -> nn.Module:
    return TowerBefore()


@advised(r"net\.tower belongs to the last.*replicated=", replicated=("net.tower",))
def a_module_used_before_and_behind_the_blocks(cured: bool) -> nn.Module:
    class Both(TowerBefore):
        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(self.tower(h), x)

    return Both()


@advised(r"net\.emb\.weight lives on another.*replicated=", replicated=("net.emb",))
def a_weight_of_the_first_stage_in_the_head(cured: bool) -> nn.Module:
    class Tied(Net):
        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return F.linear(self.norm(h), self.emb.weight)

    return Tied()


@advised(r"net\.emb is run for its shapes.*replicated=", replicated=("net.emb",))
def a_module_of_the_first_stage_that_needs_values(cured: bool) -> nn.Module:
    class Scaled(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + float(self.weight.detach()[0, 0]))

    class Values(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = Scaled(64, 32)

        def before(self, x: Tensor) -> Tensor:
            self.first = self.emb(x)
            return self.first

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(h + self.first, x)

    return Values()


@advised(r"net\.head is used after the blocks.*last=", last=("net.head",))
def a_head_defined_before_the_blocks(cured: bool) -> nn.Module:
    net = Net()
    children = net._modules
    net._modules = {name: children[name] for name in ("emb", "head", "blocks", "norm")}
    return net


@advised("was called twice.*Join the inputs of both calls")
def two_forwards_in_a_step(cured: bool) -> nn.Module:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            if cured:
                one, other = super().forward(torch.cat([x, x.flip(1)])).chunk(2)
            else:
                one, other = super().forward(x), super().forward(x.flip(1))
            return one + other.flip(1)

    return Twice()


@advised("use_reentrant=True.*Pass use_reentrant=False")
def blocks_in_a_reentrant_checkpoint(cured: bool) -> nn.Module:
    class Recomputed(Net):
        def call(self, block: nn.Module, h: Tensor) -> Tensor:
            return checkpoint(block, h, use_reentrant=not cured)

    return Recomputed()


@advised(r"Call the block, as in block\(x\)")
def blocks_whose_forward_is_called_by_name(cured: bool) -> nn.Module:
    class ByName(Net):
        def call(self, block: nn.Module, h: Tensor) -> Tensor:
            return block(h) if cured else block.forward(h)

    return ByName()


@advised("has a backward hook.*on a module inside of the block")
def backward_hooks_of_blocks(cured: bool) -> nn.Module:
    net = Net()
    for block in net.blocks:
        (block.mlp if cured else block).register_full_backward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_without_the_cure(case: str) -> None:
    with pytest.raises((RankError, AssertionError), match=f"(?s){REFUSALS[case]}"):
        CASES.check(case, "pp2", None)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_with_the_cure(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
