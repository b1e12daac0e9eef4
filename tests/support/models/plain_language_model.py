"""A small language model with a plan, as a user writes both; cases change one thing of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan

__all__ = [
    "AttendingNet",
    "NormalizedNet",
    "PlainModule",
    "PlainNet",
    "blocks_of_plain_nets",
    "token_pairs",
]

_blocks = 4
"""Of a `PlainNet`; see `blocks_of_plain_nets`."""


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class PlainNet(nn.Module):
    """Tokens [B, T] -> logits [B, T, 64]; no token sees another one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(_Block() for _ in range(_blocks))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class _Attends(nn.Module):
    """A block that looks at all earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, h: Tensor) -> Tensor:
        heads = self.up(h).unflatten(-1, (4, 8)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return h + seen.transpose(1, 2).flatten(2)


class AttendingNet(PlainNet):
    """Two blocks of attention, for context parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Attends() for _ in range(2))


class NormalizedNet(PlainNet):
    """Normalizes embeddings over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.statistics(self.emb(x).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@contextmanager
def blocks_of_plain_nets(count: int) -> Iterator[None]:
    """Give the nets that are made meanwhile `count` blocks."""
    with patch(f"{__name__}._blocks", count):
        yield


class PlainModule(pl.LightningModule):
    """Next-token prediction on pairs (tokens, labels) [B, T]; subclasses change one thing."""

    lr = 0.5
    batch = BatchLayout(sequence_dims={"0": 1, "1": 1}, labels="1")

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or PlainNet()

    def unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a batch."""
        return batch

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        x, y = self.unpack(batch)
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def parallel_plan(self) -> ParallelPlan:
        """The plan of `PlainNet`."""
        return ParallelPlan(
            blocks="net.blocks",
            tensor={
                "net.emb": "vocab_embedding",
                "net.blocks.*.norm": "sequence_parallel",
                "net.blocks.*.mlp": "gather_sequence",
                "net.blocks.*.mlp.up": "colwise",
                "net.blocks.*.mlp.down": "rowwise",
                "net.norm": "sequence_parallel",
                "net.head": "vocab_head",
            },
            batch=self.batch,
            positions={},
        )


def token_pairs(count: int = 32, length: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Random samples: tokens and labels, both [T] int64."""
    rows = torch.randint(64, (count, length + 1))
    return [(row[:-1], row[1:]) for row in rows]
