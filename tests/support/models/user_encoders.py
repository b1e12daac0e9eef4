"""Encoders of a user's own without a `config`, and data for them, as a YAML file names them."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import DataLoader

from tests.support.models.pooling_encoder import CLASSES, PoolingEncoder, TOKENS

__all__ = ["LabeledTokens", "LoggedEncoder", "TorchEncoder", "labeled_rows"]


class _Trained(pl.LightningModule):
    """Shows errors of scale, which AdamW hides, and logs the loss of all replicas."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def logged(self, loss: Tensor) -> Tensor:
        self.log("global_loss", loss, sync_dist=True)
        return loss


class LoggedEncoder(_Trained, PoolingEncoder):
    """Declares its plan."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logged(PoolingEncoder.training_step(self, batch, batch_idx))


class TorchEncoder(_Trained):
    """Of torch's own layers, without a plan."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(120, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, CLASSES)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        pooled = self.encoder(self.embed(batch["ids"])).mean(1)
        return self.logged(F.cross_entropy(self.classify(pooled), batch["label"]))


def labeled_rows(count: int) -> list[dict[str, Tensor]]:
    """Random tokens with a class."""
    ids = torch.randint(120, (count, TOKENS), generator=torch.Generator().manual_seed(3))
    return [{"ids": row, "label": row.sum() % CLASSES} for row in ids]


class LabeledTokens(pl.LightningDataModule):
    """`labeled_rows`.

    Args:
        batch_size: Of a replica.
        alone: Whether one process draws them in the order that Lightning gives to replicas.
    """

    def __init__(self, batch_size: int = 8, alone: bool = False) -> None:
        super().__init__()
        self.batch_size, self.alone = batch_size, alone

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = labeled_rows(48)
        return DataLoader(rows, batch_size=self.batch_size)
