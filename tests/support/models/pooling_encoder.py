"""A small encoder of a user's own: learned positions, a mean over the tokens, a classifier."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par import BatchLayout, ParallelPlan

__all__ = ["PoolingEncoder", "labeled_tokens"]

TOKENS, CLASSES = 16, 3


class GatedMLP(nn.Module):
    """A feed-forward with two input projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.gelu(self.gate(x)) * self.value(x))
        return result


class Block(nn.Module):
    """A norm and a feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))
        return result


class PoolingEncoder(pl.LightningModule):
    """Classifies sequences by the mean of their tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(120, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="blocks",
            tensor={
                "embed": "vocab_embedding",
                "position": "split_sequence",
                "blocks.*.norm": "sequence_parallel",
                "blocks.*.mlp": "gather_sequence",
                "blocks.*.mlp.gate": "colwise",
                "blocks.*.mlp.value": "colwise",
                "blocks.*.mlp.out": "rowwise",
                "norm": "sequence_gather_output",
                "classify": "replicated",
            },
            batch=BatchLayout(sequence_dims={"ids": 1}, labels="label"),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["ids"]
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.classify(self.norm(x).mean(1)), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def labeled_tokens(batch_size: int = 8) -> DataLoader[Any]:
    ids = torch.randint(120, (2 * batch_size, TOKENS))
    rows: Any = [{"ids": each, "label": each.sum() % CLASSES} for each in ids]
    return DataLoader(rows, batch_size=batch_size)
