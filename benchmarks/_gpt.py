"""The model and the data of the benchmarks: the reference GPT on random tokens, float32."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT

__all__ = ["CONFIG", "TOKENS", "BenchModule", "loader", "make_optimizer"]

CONFIG = GPTConfig(
    vocab_size=2048, num_layers=4, model_dim=256, num_heads=8, num_kv_heads=4, tied_head=False
)
"""4.0 million parameters."""
TOKENS = 128
"""T."""

Batch = dict[str, Tensor]


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that every contender uses."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class BenchModule(pl.LightningModule):
    """A GPT that logs nothing.

    Args:
        config: Its sizes.
    """

    model: GPT

    def __init__(self, config: GPTConfig = CONFIG) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        """Build the network, once."""
        if not hasattr(self, "model"):
            self.model = GPT(self.config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss per token."""
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW."""
        return make_optimizer(list(self.parameters()))


class _Samples(Dataset[Batch]):
    def __init__(self, length: int, tokens: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(vocab, (256, tokens + 1), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        row = self.ids[index % len(self.ids)]
        return {"input_ids": row[:-1], "labels": row[1:]}


def loader(
    batch_size: int, *, tokens: int = TOKENS, vocab: int = CONFIG.vocab_size, pin: bool = False
) -> DataLoader[Batch]:
    """Return batches without end, for all practical purposes.

    Args:
        batch_size: Of a replica.
        tokens: T.
        vocab: V.
        pin: Whether in memory from which a GPU copies by itself.
    """
    return DataLoader(_Samples(2**20, tokens, vocab), batch_size=batch_size, pin_memory=pin)
