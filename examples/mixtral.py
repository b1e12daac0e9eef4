"""A Mixtral trained from scratch: every token meets two of the experts of each layer.

python mixtral.py fit --config mixtral.yaml
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI

from lightning_par.models import Mixtral, MixtralConfig, TextDataModule


class Experts(L.LightningModule):
    def __init__(self, preset: str = "tiny", lr: float = 3e-3):
        super().__init__()
        self.config, self.lr = MixtralConfig.preset(preset), lr

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = Mixtral(self.config)

    def training_step(self, batch, batch_idx):
        logits, (balance, z) = self.model(batch["input_ids"])
        entropy = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("balance", balance, prog_bar=True, sync_dist=True)  # 1: an even load
        loss = entropy + self.config.auxiliary_weight * balance + self.config.z_weight * z
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    LightningCLI(Experts, TextDataModule)
