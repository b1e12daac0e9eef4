"""LightningModule of the reference BERT; it runs under any strategy and knows of none."""

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
    """Masked language modeling of a `Bert` on `SentenceDataModule`, optionally with sentence order.

    The mask is drawn anew in every training step, and is always the same in validation and test.
    With an order head the loss is a mean over samples: of a sample, the mean over its masked tokens
    plus the loss of its order; samples with ``sentence_order`` -100 have weight 0. Without, the
    loss is a mean over masked tokens. Either is a weighted mean, so that it does not depend on how
    a batch is split over replicas and micro-batches.

    Logs ``train_loss`` (nats, each step); ``val_loss`` and ``test_loss`` (mean over the epoch and
    all replicas); and with the prefixes ``val`` and ``test``: ``_accuracy`` (0 .. 1) and
    ``_perplexity`` of the masked tokens, and ``_order_accuracy`` (0 .. 1) with an order head. The
    arguments are those of `LanguageModule`.

    Examples:
        >>> module = BertModule(preset="tiny", lr=1e-3)
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
        """Return token logits [B, T, V], and order logits [B, 2] or None without an order head.

        Args:
            batch: Batch of `SentenceDataModule`.
        """
        out: tuple[Tensor, Tensor | None] = self.model(
            batch["input_ids"], batch["segment_ids"], batch["attention_mask"]
        )
        return out

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Mask tokens now if there is no order head.

        Args:
            batch: Batch of `SentenceDataModule`, on this rank's device.
            dataloader_idx: Not used.

        Returns:
            The batch; with masked ``input_ids`` and with ``labels`` if it was masked.
        """
        # Later, context parallelism may have sharded the sequences, and the mask is a function of
        # whole rows. With an order head there is no context parallelism, see BertConfig.
        if self.config.order_head or self.trainer.predicting:
            return batch
        return self._mask_batch(batch, self.global_step if self.trainer.training else -1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss and log it."""
        masked = self._mask_batch(batch, self.global_step) if self.config.order_head else batch
        labels = masked["labels"]
        logits, order = self(masked)
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
        """Return the most likely token at every position, [B, T]; nothing is masked."""
        logits, _ = self(batch)
        best: Tensor = logits.argmax(dim=-1)
        return best

    def _mask_batch(self, batch: Batch, step: int) -> Batch:
        """Return the batch with masked ``input_ids``, and the original tokens as ``labels``."""
        config = self.config
        assert config.mask_id is not None
        masked, labels = mask_tokens(
            batch["input_ids"],
            batch["maskable"].bool(),
            step=step,
            mask_id=config.mask_id,
            vocab_size=config.vocab_size,
        )
        return {**batch, "input_ids": masked, "labels": labels}

    def _loss(self, batch: Batch, losses: Tensor, labels: Tensor, order: Tensor | None) -> Tensor:
        """Return the mean over masked tokens, or with order logits the mean over samples."""
        counts = (labels != IGNORED).sum(1)
        if order is None:
            mean: Tensor = losses.sum() / counts.sum().clamp(min=1)
            return mean
        per_sample = losses.sum(1) / counts.clamp(min=1)
        target = batch["sentence_order"]
        upcast = order.float() if order.dtype.itemsize < 4 else order
        per_sample = per_sample + F.cross_entropy(
            upcast, target, ignore_index=IGNORED, reduction="none"
        )
        # `where` and not a product: 0 * NaN of a padded sample would be NaN.
        valid = target != IGNORED
        total: Tensor = per_sample.where(valid, 0).sum() / valid.sum().clamp(min=1)
        return total

    def _evaluate(self, batch: Batch, name: str) -> None:
        masked = self._mask_batch(batch, -1) if self.config.order_head else batch
        labels = masked["labels"]
        logits, order = self(masked)
        losses = _token_losses(logits, labels)
        loss = self._loss(batch, losses, labels, order)
        num_masked = int((labels != IGNORED).sum())
        perplexity = getattr(self, f"{name}_perplexity")
        perplexity.update(losses.sum() / max(num_masked, 1), num_masked)
        accuracy = getattr(self, f"{name}_accuracy")
        accuracy.update(logits.argmax(dim=-1), labels)
        # batch_size is the weight of this batch in the epoch's mean, so it counts what the loss is
        # a mean over.
        valid = num_masked if order is None else int((batch["sentence_order"] != IGNORED).sum())
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=valid)
        self.log(f"{name}_perplexity", perplexity)
        self.log(f"{name}_accuracy", accuracy, prog_bar=True)
        if order is not None:
            order_accuracy = getattr(self, f"{name}_order_accuracy")
            order_accuracy.update(order.argmax(dim=-1), batch["sentence_order"])
            self.log(f"{name}_order_accuracy", order_accuracy)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every token, [B, T], in nats; 0 where no token was masked."""
    # The log-sum-exp over V loses too much in 16 bits.
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape)
