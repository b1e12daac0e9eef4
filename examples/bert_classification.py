"""BERT decides which package of Python's standard library a passage is from.

python bert_classification.py fit --config bert_classification.yaml
"""

import email
import sqlite3
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

PAD = 0


class Classifier(L.LightningModule):
    def __init__(self, dropout: float = 0.1, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
        config = BertConfig(
            vocab_size=256,
            num_attention_heads=4,
            max_position_embeddings=128,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            pad_token_id=PAD,
            **sizes,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("loss", out.loss, prog_bar=True, sync_dist=True)
        hits = out.logits.argmax(1) == batch["labels"]
        self.log("accuracy", hits.double().mean(), prog_bar=True, sync_dist=True)
        return out.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Passages(L.LightningDataModule):
    """Lines of two packages, as bytes, padded to one length."""

    def __init__(self, length: int = 64, batch_size: int = 16):
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def train_dataloader(self):
        samples = []
        for label, package in enumerate((email, sqlite3)):
            for file in sorted(Path(package.__file__).parent.glob("*.py")):
                for line in file.read_bytes().splitlines()[:60]:
                    tokens = torch.tensor(list(line.strip()[: self.length]) or [32])
                    ids = torch.full((self.length,), PAD)
                    ids[: len(tokens)] = tokens
                    mask = (ids != PAD).long()
                    samples += [{"input_ids": ids, "attention_mask": mask, "labels": label}]
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    LightningCLI(Classifier, Passages)
