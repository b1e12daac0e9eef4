"""Blocks that mix tokens by other means than attention, and positions that a model counts."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from lightning_par import attention, ParallelPlan
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
        elif self.counts == "if not given":
            counted = torch.arange(x.shape[1], device=x.device)[None]
            h = h + self.places(counted if positions is None else positions)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h)
        return out


class _Module(PlainModule):
    def __init__(
        self, mix: Callable[[nn.Module, Tensor], Tensor] | None = None, counts: str = ""
    ) -> None:
        super().__init__(_Net(mix or (lambda block, h: torch.tanh(h)), counts))

    positions: Mapping[str, str] = {}

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks="net.blocks", batch=self.batch, positions=self.positions)


@CASES.add(equal="cp2")
def attention_alone() -> Any:
    return _Module(), token_pairs()


def _without_a_plan() -> Any:
    module: Any = _Module()
    module.parallel_plan = None
    return module, token_pairs()


@CASES.add(refused={"cp2": r"needs a parallel_plan.*pass plan= to the strategy"})
def a_module_without_a_plan() -> Any:
    return _without_a_plan()


@CASES.add(
    equal="cp2",
    strategy={"plan": ParallelPlan(blocks="net.blocks", batch=PlainModule.batch, positions={})},
)
def a_plan_that_the_strategy_gets() -> Any:
    return _without_a_plan()


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
    CASES.add(equal=equal, refused={"cp2": f"_Block .* combines tokens of a sequence with {name}"})(
        make
    )


for _name, _mix in MIXERS.items():
    _add(_name, _mix)


@CASES.add(equal="pp2", refused={"cp2": r"_Net .* counts positions from 0"})
def positions_counted_by_the_model() -> Any:
    return _Module(counts="arange"), token_pairs()


@CASES.add(equal="cp2")
def positions_that_the_forward_takes() -> Any:
    """What the refusal of the case above says."""

    module = _Module(counts="if not given")
    module.positions = {"net": "positions"}
    return module, token_pairs()


@CASES.add(
    refused={"cp2": r"names 'net', but no module of that name was called\. Call the module itself"},
    strategy={"verify": False},
)
def positions_of_a_forward_that_is_called_by_name() -> Any:
    module, samples = positions_that_the_forward_takes()

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(module.net.forward(batch[0]).flatten(0, 1), batch[1].flatten())

    module.loss = loss
    return module, samples


@CASES.add(refused={"cp2": r"_Net .* counts positions from 0"})
def first_rows_of_a_table_of_positions() -> Any:
    return _Module(counts="rows"), token_pairs()


class _Attention(nn.Module):
    """A block that attends in a way of the user's."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.qkv = attend, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


def _attending(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
    module = _Module()
    module.net.blocks = nn.ModuleList(_Attention(attend) for _ in range(2))
    return module, token_pairs()


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(2, 3) / 8**0.5).softmax(-1)
    return weights @ v


def _with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def _with_a_causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@CASES.add(refused={"cp2": r"call F\.scaled_dot_product_attention or lightning_par\.attention"})
def attention_by_hand() -> Any:
    return _attending(_by_hand)


@CASES.add(refused={"cp2": r"dropout_p=0\.1 .*Set the dropout of attention to 0"})
def attention_with_dropout() -> Any:
    return _attending(_with_dropout)


@CASES.add(refused={"cp2": r"attn_mask of shape .*Use is_causal=True for a causal mask"})
def attention_with_a_causal_mask() -> Any:
    return _attending(_with_a_causal_mask)


@CASES.add(equal="cp2")
def attention_by_the_function_of_torch() -> Any:
    """What the refusals of attention by hand and with dropout say."""
    return _attending(F.scaled_dot_product_attention)


@CASES.add(equal="cp2")
def attention_that_is_causal_by_an_argument() -> Any:
    """What the refusal of a causal mask says."""
    return _attending(lambda *args: F.scaled_dot_product_attention(*args, is_causal=True))


@CASES.add(equal="cp2")
def attention_that_is_causal_by_our_function() -> Any:
    """What the refusal of a causal mask says, too."""
    return _attending(lambda *args: attention(*args, causal=True))


class _Gathers(_Module):
    """Logs a number of the tokens of all ranks, by which the learning rate goes."""

    whole = False

    def loss(self, batch: Any) -> Tensor:
        tokens = self.net.emb(batch[0]).detach().mean((0, 2))
        strategy: Any = self.trainer.strategy
        if self.whole and hasattr(strategy, "mesh"):
            self.all_gather(tokens, group=strategy.mesh.token_group)
        else:
            self.all_gather(tokens)
        return super().loss(batch)


@CASES.add(
    refused={
        "cp2": r"self\.all_gather was called .*group=self\.trainer\.strategy\.mesh\.token_group"
    }
)
def tokens_that_the_step_gathers() -> Any:
    return _Gathers(), token_pairs()


@CASES.add(equal="cp2")
def tokens_that_the_step_gathers_from_all_ranks() -> Any:
    """What the refusal of the case above says."""
    module = _Gathers()
    module.whole = True
    return module, token_pairs()


@CASES.add(refused={"cp2": r"have different lengths.*must have the same number"})
def labels_of_another_length() -> Any:
    return _with_labels(cut=False)


@CASES.add(equal="cp2")
def labels_cut_to_one_length_in_the_collate_function() -> Any:
    """What the catalogue says of the refusal above (LP304)."""
    return _with_labels(cut=True)


def _with_labels(cut: bool) -> Any:
    class Module(_Module):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x)[:, : y.shape[1]].flatten(0, 1), y.flatten())

    def collate(samples: Any) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return (x[:, : y.shape[1]] if cut else x), y

    return Module(), [(x, y[:8]) for x, y in token_pairs()], collate


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
