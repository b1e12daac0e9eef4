"""A GPT from token files: text is tokenized once, then read from disk window by window.

python gpt_pretraining.py fit --config gpt_pretraining.yaml
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI

from lightning_par.models import GPT, GPTConfig, TextDataModule, write_token_file

FOLDER = str(Path(__file__).parents[1] / "lightning_par")


class Pretraining(L.LightningModule):
    def __init__(self, preset: str = "tiny", lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):  # parameters made here take no memory until they are placed
        if not hasattr(self, "model"):
            self.model = GPT(GPTConfig.preset(self.hparams.preset))

    def loss(self, batch):
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=steps
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Corpus(TextDataModule):
    """The Python files of a folder, as bytes; put your tokenizer and your text here."""

    def __init__(self, folder: str = FOLDER, batch_size: int = 8):
        super().__init__(["runs/corpus.bin"], length=64, batch_size=batch_size)
        self.folder = Path(folder)

    def prepare_data(self):  # Lightning calls it in one process of each host
        Path(self.paths[0]).parent.mkdir(exist_ok=True)
        files = sorted(self.folder.rglob("*.py"))
        tokens = (np.frombuffer(file.read_bytes(), dtype=np.uint8) for file in files)
        write_token_file(self.paths[0], tokens, vocab_size=256)


if __name__ == "__main__":
    LightningCLI(Pretraining, Corpus)
