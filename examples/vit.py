"""A vision transformer on images of coloured squares: which quarter is the brightest?

python vit.py fit --config vit.yaml
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification


class Classifier(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        # Any model that turns images into logits
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
        self.model = ViTForImageClassification(
            ViTConfig(image_size=32, patch_size=8, num_attention_heads=4, num_labels=4, **sizes)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images).logits
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log("accuracy", (logits.argmax(1) == labels).double().mean(), sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Squares(L.LightningDataModule):
    """Noise, with one quarter of each image brighter."""

    def __init__(self, count: int = 512, batch_size: int = 16):
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self):
        random = torch.Generator().manual_seed(0)
        dtype = torch.get_default_dtype()
        images = torch.randn(self.count, 3, 32, 32, generator=random).to(dtype)
        labels = torch.randint(4, (self.count,), generator=random)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = 16 * (label // 2), 16 * (label % 2)
            image[:, row : row + 16, column : column + 16] += 0.5
        samples = list(zip(images, labels, strict=True))
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Classifier, Squares)
