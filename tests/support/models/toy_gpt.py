"""A small language model as a user would write it: no rank, no mesh, and a plan at the end."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan

VOCAB, WIDTH, TOKENS = 19, 24, 12


class Attention(nn.Module):
    """Grouped-query attention: several query heads share a key/value head."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.query = nn.Linear(width, heads * self.head_dim)
        self.key = nn.Linear(width, kv_heads * self.head_dim)
        self.value = nn.Linear(width, kv_heads * self.head_dim)
        self.out = nn.Linear(heads * self.head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        size, tokens, _ = x.shape
        q = self.query(x).view(size, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(size, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(size, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(size, tokens, self.heads * self.head_dim))


class Block(nn.Module):
    """Pre-norm block; blocks differ in the width of their MLP, so that stages are unequal."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, kv_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ToyLM(nn.Module):
    """Learned positions; the head may be tied to the embedding, blocks may be recomputed."""

    def __init__(
        self,
        blocks: int = 4,
        tied: bool = True,
        heads: int = 6,
        kv_heads: int = 2,
        vocab: int = VOCAB,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocab, WIDTH)
        self.position = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(
            Block(WIDTH, 8 * (2 + i % 3), heads, kv_heads) for i in range(blocks)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.embed(ids) + self.position(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="blocks",
            tensor={
                "embed": "vocab_embedding",
                "position": "split_sequence",
                "blocks.*.norm[12]": "sequence_parallel",
                "blocks.*.attention": "gather_sequence",
                "blocks.*.attention.query": "colwise",
                "blocks.*.attention.key": "colwise",
                "blocks.*.attention.value": "colwise",
                "blocks.*.attention.out": "rowwise",
                "blocks.*.mlp": "gather_sequence",
                "blocks.*.mlp.0": "colwise",
                "blocks.*.mlp.2": "rowwise",
                "norm": "sequence_parallel",
                "head": "vocab_head",
            },
            divided={"blocks.*.attention": ("heads", "kv_heads")},
            batch=BatchLayout(sequence_dims={"ids": 1, "labels": 1}, labels="labels"),
            positions={"": "positions"},
        )


class ToyModule(pl.LightningModule):
    """Built in the constructor; AdamW, SGD or Adam in two groups, each with rates of its own.

    `masked` writes the mean over valid labels by hand, which is 0/0 where there is none; `trains`
    names the only part that is not frozen, which the optimizer alone is given.
    """

    def __init__(
        self,
        optimizer: str = "adamw",
        masked: bool = False,
        trains: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = ToyLM(**options)
        self.optimizer, self.masked = optimizer, masked
        if trains is not None:
            self.model.requires_grad_(False)
            self.model.get_submodule(trains).requires_grad_(True)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["ids"])
        flat, labels = logits.view(-1, logits.size(-1)), batch["labels"].flatten()
        if self.masked:
            losses = F.cross_entropy(flat, labels, reduction="none")
            mask = (labels != -100).to(losses.dtype)
            return (losses * mask).sum() / mask.sum()
        return F.cross_entropy(flat, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # The gradient of a key's bias is zero but for rounding, which eps has to outweigh.
        if self.optimizer == "groups":
            matrices = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim == 1]
            groups = [{"params": matrices, "weight_decay": 0.2, "betas": (0.7, 0.9)}]
            groups += [{"params": others, "lr": 3e-2}]
            made = torch.optim.Adam(groups, lr=1e-2, eps=1e-6)
            factors = [lambda step: 0.5**step, lambda step: 1 / (1 + step)]
            rates = torch.optim.lr_scheduler.LambdaLR(made, factors)
            return [made], [{"scheduler": rates, "interval": "step"}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        trained = (p for p in self.parameters() if p.requires_grad)
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-6)


class ToyData(Dataset[dict[str, Tensor]]):
    """Random tokens; with `ignored`, labels at the start of a sample do not count.

    How many differs over the samples: none of sample 0, all of sample 5.
    """

    def __init__(
        self, size: int, ignored: bool = False, vocab: int = VOCAB, tokens: int = TOKENS
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, vocab, (size, tokens + 1), generator=generator)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = self.ids[index, :-1], self.ids[index, 1:].clone()
        if self.ignored:
            labels[: (index * 5) % (len(labels) + 1)] = -100
        return {"ids": ids, "labels": labels}


def loader(data: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=batch_size, **options)
