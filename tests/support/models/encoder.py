"""A small encoder with padding, and a GPT, trained on any strategy; what came out."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from lightning_par import attention, BatchLayout, ParallelPlan
from lightning_par.models import GPTModule
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer, Recorder, Result

VOCAB, WIDTH, HEADS, LENGTH = 19, 24, 4, 13
PACKED = (0, 3, 4, 9, 13)


class EncoderBlock(nn.Module):
    """Attends by torch's function under a mask of padding, or to packed documents by ours."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.norm, self.inputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, visible: Tensor, bounds: Tensor) -> Tensor:
        parts = self.inputs(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        if self.packed:
            y = attention(q, k, v, causal=True, cu_seqlens=bounds)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + F.gelu(self.mlp(x))


class Encoder(pl.LightningModule):
    """Takes its positions from the batch; logs without sync_dist, and a metric."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(EncoderBlock(packed) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        text = batch["text"]
        x = self.embed(text["ids"]) + self.position(text["places"])
        visible = text["visible"][:, None, None]
        for block in self.blocks:
            x = block(x, visible, batch["bounds"])
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("most_valid", (batch["labels"] != -100).sum().to(loss), reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, count = self.loss(batch), int((batch["labels"] != -100).sum())
        self.mean.update(loss if count else torch.zeros(()), count)
        self.log("val_mean", self.mean)
        self.log("val_loss", loss if count else loss * 0, batch_size=count, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def parallel_plan(self) -> ParallelPlan:
        entries = ("text.ids", "text.places", "text.visible", "labels")
        return ParallelPlan(
            blocks="blocks",
            batch=BatchLayout(sequence_dims=dict.fromkeys(entries, 1), labels="labels"),
            positions={},
        )


class Sentences(Dataset[Any]):
    """Samples of other lengths; a third of their tokens is to be told, of some samples none."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, VOCAB, (size, LENGTH), generator=draw)
        self.told = torch.rand((size, LENGTH), generator=draw) < 0.3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        visible = torch.arange(LENGTH) < 4 + index * 5 % 10
        told = self.told[index] & visible & (index != 2)
        text = {"ids": self.ids[index], "places": torch.arange(LENGTH), "visible": visible}
        labels = self.ids[index].where(told, -100)
        return {"text": text, "labels": labels, "bounds": torch.tensor(PACKED)}


def collate(samples: list[Any]) -> Any:
    """All samples of a batch are packed alike."""
    batch: Any = torch.utils.data.default_collate(samples)
    return {**batch, "bounds": batch["bounds"][0]}


class Words(Dataset[Any]):
    """Random tokens for a GPT, labels shifted."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, VOCAB, (size, LENGTH + 1), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        labels = self.ids[index, 1:].clone()
        labels[: index * 5 % LENGTH] = -100
        return {"input_ids": self.ids[index, :-1], "labels": labels}


class SgdGPT(GPTModule):
    """Shows errors of scale, which AdamW hides."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def make_gpt(positions: str) -> pl.LightningModule:
    sizes = {"num_layers": 3, "model_dim": 24, "num_heads": 6, "num_kv_heads": 2, "ff_dim": 20}
    module = SgdGPT(
        overrides={**sizes, "vocab_size": VOCAB, "max_length": LENGTH, "positions": positions}
    )
    torch.manual_seed(5)
    module.configure_model()
    return module


MODELS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[int], Any], Any]] = {
    "encoder": (Encoder, Sentences, collate),
    "packed": (lambda: Encoder(packed=True), Sentences, collate),
    "gpt": (lambda: make_gpt("rotary"), Words, None),
    "gpt learned": (lambda: make_gpt("learned"), Words, None),
}


def train_model(name: str, strategy: Any, devices: int, batch_size: int) -> Result:
    """Three batches in float64, the last one odd, then validation."""
    torch.set_default_dtype(torch.float64)
    make, data, gather = MODELS[name]
    recorder, module = Recorder(), make()
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=0.5,
    )
    rows = {"collate_fn": gather, "shuffle": False}
    trainer.fit(module, loader(data(10), batch_size, **rows), loader(data(6), batch_size, **rows))
    state = getattr(trainer.strategy, "gather_state_dict", module.state_dict)()
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "weights": {k: v.detach().clone() for k, v in state.items()},
    }
