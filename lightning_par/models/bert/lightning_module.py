"""The LightningModule of the reference BERT. It runs under any strategy and knows of none."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_par.models.bert.config import BertConfig
from lightning_par.models.bert.masking import IGNORED, mask_tokens
from lightning_par.models.bert.model import Bert
from lightning_par.models.language_module import LanguageModule
from lightning_par.models.metrics import Perplexity

__all__ = ["BertModule"]

Batch = Mapping[str, Tensor]


class BertModule(LanguageModule):
    """Trains a `Bert` on the batches of `SentenceDataModule`, hiding other tokens in every step.

    With an order head, every sample counts the same: its loss is the mean over its hidden tokens,
    plus that of its order. A sample whose ``sentence_order`` is -100 does not count. Without, every
    hidden token counts the same. So the loss of a batch does not depend on how the batch is divided
    among devices. What validation hides is always the same.

    Logs ``train_loss`` (nats, each step); ``val_loss`` and ``test_loss`` (over an epoch and all
    replicas), and for each of the two, of the hidden tokens, ``_accuracy`` (0 .. 1) and
    ``_perplexity``, and ``_order_accuracy`` where there is an order head. The arguments are those
    of `LanguageModule`.
    """

    config_type = BertConfig
    model_type = Bert
    model: Bert
    config: BertConfig

    def _add_metrics(self) -> None:
        options: dict[str, Any] = {"average": "micro", "validate_args": False}
        options["ignore_index"] = IGNORED
        for name in ("val", "test"):
            tokens = MulticlassAccuracy(self.config.vocab_size, **options)
            setattr(self, f"{name}_accuracy", tokens)
            setattr(self, f"{name}_perplexity", Perplexity())
            if self.config.order_head:
                setattr(self, f"{name}_order_accuracy", MulticlassAccuracy(2, **options))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, T, V], and [B, 2] if there is an order head."""
        out: tuple[Tensor, Tensor | None] = self.model(
            batch["input_ids"], batch["segment_ids"], batch["attention_mask"]
        )
        return out

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Without an order head, hide tokens now: later, a rank may have a part of every sample."""
        if self.config.order_head or self.trainer.predicting:
            return batch
        return self._hide(batch, self.global_step if self.trainer.training else -1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss and log it."""
        shown = self._hide(batch, self.global_step) if self.config.order_head else batch
        labels = shown["labels"]
        logits, order = self(shown)
        loss = self._loss(batch, _token_losses(logits, labels), labels, order)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss and the metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss and the metrics."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely token at every position, [B, T]; nothing is hidden."""
        logits, _ = self(batch)
        best: Tensor = logits.argmax(dim=-1)
        return best

    def _hide(self, batch: Batch, step: int) -> Batch:
        """Return the batch with other ``input_ids``, and the hidden tokens as ``labels``."""
        config = self.config
        assert config.mask_id is not None
        shown, labels = mask_tokens(
            batch["input_ids"],
            batch["maskable"].bool(),
            step=step,
            mask_id=config.mask_id,
            vocab_size=config.vocab_size,
        )
        return {**batch, "input_ids": shown, "labels": labels}

    def _loss(self, batch: Batch, losses: Tensor, labels: Tensor, order: Tensor | None) -> Tensor:
        """Return the mean over the hidden tokens; over samples if their order counts, too."""
        counts = (labels != IGNORED).sum(1)
        if order is None:
            mean: Tensor = losses.sum() / counts.sum().clamp(min=1)
            return mean
        per_sample = losses.sum(1) / counts.clamp(min=1)
        target = batch["sentence_order"]
        wide = order.float() if order.dtype.itemsize < 4 else order
        per_sample = per_sample + F.cross_entropy(
            wide, target, ignore_index=IGNORED, reduction="none"
        )
        valid = target != IGNORED
        total: Tensor = per_sample.where(valid, 0).sum() / valid.sum().clamp(min=1)
        return total

    def _evaluate(self, batch: Batch, name: str) -> None:
        shown = self._hide(batch, -1) if self.config.order_head else batch
        labels = shown["labels"]
        logits, order = self(shown)
        losses = _token_losses(logits, labels)
        loss = self._loss(batch, losses, labels, order)
        hidden = int((labels != IGNORED).sum())
        perplexity = getattr(self, f"{name}_perplexity")
        perplexity.update(losses.sum() / max(hidden, 1), hidden)
        accuracy = getattr(self, f"{name}_accuracy")
        accuracy.update(logits.argmax(dim=-1), labels)
        valid = hidden if order is None else int((batch["sentence_order"] != IGNORED).sum())
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=valid)
        self.log(f"{name}_perplexity", perplexity)
        self.log(f"{name}_accuracy", accuracy, prog_bar=True)
        if order is not None:
            order_accuracy = getattr(self, f"{name}_order_accuracy")
            order_accuracy.update(order.argmax(dim=-1), batch["sentence_order"])
            self.log(f"{name}_order_accuracy", order_accuracy)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every token, [B, T], in nats, 0 where nothing was hidden."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape)
