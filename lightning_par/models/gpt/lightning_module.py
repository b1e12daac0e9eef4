"""LightningModule of the reference GPT; it runs under any strategy and knows of none."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT
from lightning_par.models.language_module import group_parameters, LanguageModule
from lightning_par.models.metrics import Perplexity

__all__ = ["GPTModule", "group_parameters", "model_inputs"]

Batch = Mapping[str, Tensor]

_IGNORE_INDEX = -100


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return what a decoder takes of a batch.

    Args:
        batch: As `GPTModule` takes it.
    """
    names = "input_ids", "position_ids", "cu_seqlens"
    return {name: batch[name] for name in names if name in batch}


class GPTModule(LanguageModule):
    """Causal language modeling of a `GPT` on ``{"input_ids": [B, T], "labels": [B, T]}``, with
    ``position_ids`` and ``cu_seqlens`` where rows are packed documents.

    Labels are already shifted (see `TextDataModule`); -100 is ignored. Logs ``train_loss`` (nats
    per token, each step), ``val_loss`` and ``test_loss`` (mean over the epoch's tokens and all
    replicas), ``val_perplexity`` and ``test_perplexity``. The arguments are those of
    `LanguageModule`.

    Examples:
        >>> module = GPTModule(preset="tiny", overrides={"num_layers": 8}, lr=1e-3)
    """

    config_type = GPTConfig
    model_type = GPT
    model: GPT

    def _add_metrics(self) -> None:
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()

    def forward(self, input_ids: Tensor, **packed: Tensor) -> Tensor:
        """Return logits [B, T, V].

        Args:
            input_ids: [B, T], int64.
            packed: `position_ids` and `cu_seqlens`, see `GPT.forward`.
        """
        logits: Tensor = self.model(input_ids, **packed)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss per token and log it."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_perplexity``."""
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_perplexity``."""
        self._evaluate(batch, "test", self.test_perplexity)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely next token at every position, [B, T]."""
        return self._logits(batch).argmax(dim=-1)

    def _logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self(**model_inputs(batch))
        return logits

    def _loss(self, batch: Batch) -> Tensor:
        return self._token_loss(self._logits(batch), batch["labels"])

    def _token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        # The log-sum-exp over V loses too much in 16 bits.
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORE_INDEX)

    def _evaluate(self, batch: Batch, name: str, perplexity: Perplexity) -> None:
        loss = self._loss(batch)
        count = int((batch["labels"] != _IGNORE_INDEX).sum())
        if count == 0:
            # The mean over no token is NaN, and times a weight of 0 still NaN in the epoch's mean.
            loss = torch.zeros_like(loss)
        perplexity.update(loss, count)
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=count)
        self.log(f"{name}_perplexity", perplexity, prog_bar=True)
