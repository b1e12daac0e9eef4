"""Optimizers, and lists of parameters, that were made before the mesh replaced the parameters."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
_SOME = "tp2 zero3"
_REST = "pp2 tp2pp2 zero0 zero1 zero1tp2"


class Early(PlainModule):
    """Makes its optimizer in `__init__`; subclasses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = self.make()

    def make(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.held


@CASES.add(equal=_SOME, large=_REST)
def in_init() -> Any:
    return Early(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3 zero1tp2")
def in_setup_of_groups_by_lists() -> Any:
    class Module(PlainModule):
        def setup(self, stage: str) -> None:
            self.matrices = [p for p in self.parameters() if p.ndim == 2]
            self.rest = [p for p in self.parameters() if p.ndim != 2]

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.matrices, "weight_decay": 0.3}, {"params": self.rest}]
            return torch.optim.AdamW(groups, lr=0.01)

    return Module(), token_pairs()


@CASES.add(equal="tp2", large="pp2 zero3")
def of_the_caller() -> Any:
    """A closure of the script holds the optimizer's class and the parameters."""
    module: Any = PlainModule()
    held = list(module.parameters())
    module.configure_optimizers = lambda: torch.optim.SGD(held, lr=0.1, momentum=0.9)
    return module, token_pairs()


@CASES.add(
    equal="zero3",
    large="tp2 pp2 zero1tp2",
    trainer={"precision": "32-true"},
    tolerance=1e-5,
)
def with_a_state_already() -> Any:
    """As one that is loaded, or warmed up, by hand."""

    class Module(Early):
        def make(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            for parameter in self.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return optimizer

    return Module(), token_pairs()


class Lookahead(torch.optim.Optimizer):
    """Keeps pairs of a parameter and its slow copy, a list of copies, and an optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults
        self.pairs = [(p, p.detach().clone()) for g in self.param_groups for p in g["params"]]
        self.first = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        super().__init__(self.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for parameter, slow in self.pairs:
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        for group, first in zip(self.param_groups, self.first, strict=True):
            for parameter, start in zip(group["params"], first, strict=True):
                parameter.lerp_(start, 0.01)
        return loss


class LookaheadByEntry(Lookahead):
    looks_across = "entry"


def _with_pairs(kind: type[Lookahead]) -> Any:
    class Module(Early):
        def make(self) -> Any:
            return kind(torch.optim.SGD(self.parameters(), lr=0.1))

    return Module(), token_pairs()


@CASES.add(
    equal="tp2 pp2",
    large="zero3 tp2pp2",
    trainer={"precision": "32-true"},
    tolerance=1e-5,
)
def with_pairs_inside() -> Any:
    return _with_pairs(LookaheadByEntry)


@CASES.add(refused={"tp2 pp2": "Lookahead stores parameters or copies of them in pairs.*'entry'"})
def with_pairs_inside_of_unknown_reach() -> Any:
    return _with_pairs(Lookahead)


class LookaheadInState(Lookahead):
    """Takes the parameters from its groups, and keeps their copies in its state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        del self.pairs, self.first

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        for p in held:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        loss = self.inner.step(closure)
        for p in held:
            self.state[p]["slow"].lerp_(p, 0.5)
            p.copy_(self.state[p]["slow"])
        return loss


@CASES.add(equal="tp2 pp2", large="zero3")
def with_copies_in_its_state() -> Any:
    """What the refusal of the case above says, too."""
    return _with_pairs(LookaheadInState)


@CASES.add(
    refused={"tp2 pp2 zero1": "trains 1 tensor that is no parameter.* LightningModule in __init"}
)
def of_a_tensor_beside_the_module() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.beside = [nn.Parameter(torch.ones(()))]

        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * self.beside[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), *self.beside], lr=0.1)

    return Module(), token_pairs()


@CASES.add(equal="tp2_whole_sequence zero1")
def of_a_parameter_that_was_beside_the_module() -> Any:
    """What the refusal of the case above says."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.beside = nn.Parameter(torch.ones(()))

        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * self.beside

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
