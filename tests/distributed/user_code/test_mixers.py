"""Blocks that mix tokens by other means than attention, and positions that a model counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from lightning_par import ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


class _Block(nn.Module):
    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.mix(self, h)


class _Net(nn.Module):
    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor], counts: str) -> None:
        super().__init__()
        self.emb, self.places = nn.Embedding(64, 32), nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(_Block(mix) for _ in range(2))
        self.head = nn.Linear(32, 64)
        self.counts = counts

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        h = self.emb(x)
        if self.counts == "arange":
            h = h + self.places(torch.arange(x.shape[1], device=x.device))
        elif self.counts == "rows":
            h = h + self.places.weight[: x.shape[1]]
        elif positions is not None:
            h = h + self.places(positions)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h)
        return out


class _Module(PlainModule):
    def __init__(
        self, mix: Callable[[nn.Module, Tensor], Tensor] | None = None, counts: str = ""
    ) -> None:
        super().__init__(_Net(mix or (lambda block, h: torch.tanh(h)), counts))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks="net.blocks", batch=self.batch, positions={})


@CASES.add(equal="cp2")
def attention_alone() -> Any:
    return _Module(), token_pairs()


def _short_convolution(block: Any, h: Tensor) -> Tensor:
    out: Tensor = block.conv(h.transpose(1, 2))
    return out[..., : h.shape[1]].transpose(1, 2)


def _flex_attention(block: Any, h: Tensor) -> Tensor:
    heads = h.unflatten(-1, (4, 8)).transpose(1, 2)
    out: Any = flex_attention(heads, heads, heads)
    return out.transpose(1, 2).flatten(2)


MIXERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "conv1d": _short_convolution,
    "cumsum": lambda block, h: h.cumsum(1) / 8,
    "mean": lambda block, h: h - h.mean(1, keepdim=True),
    "pad": lambda block, h: F.pad(h, (0, 0, 1, -1)),
    "roll": lambda block, h: h.roll(1, dims=1),
    "flex_attention": _flex_attention,
    "__getitem__": lambda block, h: torch.cat([h[:, 1:], h[:, :1]], 1),
}


def _add(name: str, mix: Callable[[Any, Tensor], Tensor]) -> None:
    def make() -> Any:
        return _Module(mix), token_pairs()

    make.__name__ = f"mixes_by_{name.strip('_')}"
    equal = "pp2 zero3" if name == "conv1d" else ""
    CASES.add(equal=equal, refused={"cp2": f"_Block .* mixes tokens with {name}"})(make)


for _name, _mix in MIXERS.items():
    _add(_name, _mix)


@CASES.add(equal="pp2", refused={"cp2": r"_Net .* counts positions from 0"})
def positions_counted_by_the_model() -> Any:
    return _Module(counts="arange"), token_pairs()


@CASES.add(refused={"cp2": r"_Net .* counts positions from 0"})
def first_rows_of_a_table_of_positions() -> Any:
    return _Module(counts="rows"), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
