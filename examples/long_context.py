"""Long sequences: each device keeps a part of the tokens, keys and values go round a ring.

python long_context.py fit --config long_context.yaml
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI

from lightning_par.models import GPT, GPTConfig, TextDataModule


class LongContext(L.LightningModule):
    def __init__(self, max_length: int = 4096, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.model = GPT(GPTConfig.preset("tiny", num_layers=2, max_length=max_length))

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    LightningCLI(LongContext, TextDataModule)
