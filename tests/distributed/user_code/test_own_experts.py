"""Experts that a user writes by the page on experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


class OwnExperts(nn.Module):
    """One matrix per expert; rows come sorted by expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 32, 32) / 6)

    def compute(
        self, rows: Tensor, counts: Tensor, beside: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        parts = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        held = [part @ weight for part, weight in zip(parts, self.weight, strict=False)]
        return torch.cat([*held, parts[-1]]), beside()


class OwnMixture(nn.Module):
    """Each token goes to the expert of its largest score, and through a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(32, 4, bias=False), nn.Linear(32, 32)
        self.experts = OwnExperts(4)

    def mix(self, rows: Tensor, counts: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts.compute(rows, counts, lambda: self.shared(flat))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        score, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=4)
        rows, beside = self.mix(flat[order], counts, flat)
        mixed = torch.zeros_like(flat).index_copy(0, order, rows) * score[:, None]
        return x + (mixed + beside).view_as(x)


def _module(mixture: type[nn.Module], experts: tuple[str, ...] = ("net.blocks.*.experts",)) -> Any:
    net = PlainNet()
    for number in range(len(net.blocks)):
        net.blocks[number] = mixture()
    module = PlainModule(net)
    plan = replace(module.parallel_plan(), tensor={}, experts=experts)
    module.parallel_plan = lambda: plan  # type: ignore[method-assign]
    return module, token_pairs()


@CASES.add(equal="zero1ep2 zero3ep2 zero1 pp2")
def experts_with_a_shared_layer_beside() -> Any:
    return _module(OwnMixture)


@CASES.add(equal="zero1ep2")
def experts_with_nothing_beside() -> Any:
    class Plain(OwnExperts):
        def compute(self, rows: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
            return super().compute(rows, counts, lambda: rows)[0]

    class Mixture(OwnMixture):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Plain(4)

        def mix(self, rows: Tensor, counts: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
            return self.experts.compute(rows, counts), self.shared(flat)

    return _module(Mixture)


@CASES.add(refused={"zero1ep2": r"which modules hold its experts.*compute\(rows, counts\)"})
def experts_that_no_plan_names() -> Any:
    return _module(OwnMixture, experts=())


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
