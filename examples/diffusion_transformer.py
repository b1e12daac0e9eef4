"""A diffusion transformer (DiT) that learns to draw discs, by predicting the noise in them.

python diffusion_transformer.py fit --config diffusion_transformer.yaml
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    """Attention and MLP; scales, shifts and gates come from the time (adaLN-Zero)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulation.weight)

    def forward(self, x, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        heads = (f(y).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads))
        x = x + gate1 * self.out(y.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Diffusion(L.LightningModule):
    def __init__(self, dim: int = 48, heads: int = 4, depth: int = 4, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.patches = nn.Conv2d(1, dim, kernel_size=4, stride=4)
        self.position = nn.Embedding(16, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 16)

    def forward(self, images, time):  # images [B, 1, 16, 16], time [B, 1] from 0 to 1
        place = self.position(torch.arange(16, device=images.device))
        x, time = self.patches(images).flatten(2).mT + place, self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return F.fold(self.head(self.norm(x)).mT, (16, 16), kernel_size=4, stride=4)

    def training_step(self, images, batch_idx):  # a straight way from the image to noise
        noise, time = torch.randn_like(images), torch.rand_like(images[:, :1, 0, 0])
        part = time[:, :, None, None]
        velocity = self((1 - part) * images + part * noise, time)
        loss = F.mse_loss(velocity, noise - images)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Discs(L.LightningDataModule):
    def __init__(self, count: int = 512, batch_size: int = 16):
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self):
        random = torch.Generator().manual_seed(0)
        x, y, radius = (4 + 8 * torch.rand(3, self.count, 1, 1, 1, generator=random)).unbind()
        grid = torch.arange(16.0)
        inside = (grid[:, None] - y) ** 2 + (grid - x) ** 2 < (radius / 2) ** 2
        images = 2 * inside.to(torch.get_default_dtype()) - 1
        return DataLoader(images, batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Diffusion, Discs)
