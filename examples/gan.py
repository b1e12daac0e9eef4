"""A GAN that learns a ring of points: two networks, two optimizers, stepped by hand.

python gan.py fit --config gan.yaml
"""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

LATENT = 8


def mlp(inputs, outputs, width=64):
    hidden = (nn.Linear(width, width), nn.LeakyReLU(0.2))
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), *hidden, nn.Linear(width, outputs)
    )


class Gan(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr, self.automatic_optimization = lr, False
        self.generator, self.critic = mlp(LATENT, 2), mlp(2, 1)

    def judge(self, points, real):
        logits = self.critic(points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, points, batch_idx):
        generator, critic = self.optimizers()

        self.toggle_optimizer(generator)
        loss = self.judge(self.generator(points.new_empty(len(points), LATENT).normal_()), True)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(critic)
        fake = self.generator(points.new_empty(len(points), LATENT).normal_()).detach()
        critic_loss = self.judge(points, True) + self.judge(fake, False)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        self.untoggle_optimizer(critic)
        self.log_dict({"loss": loss, "critic_loss": critic_loss}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        nets = (self.generator, self.critic)
        return [torch.optim.Adam(net.parameters(), lr=self.lr, betas=(0.5, 0.9)) for net in nets]


class Ring(L.LightningDataModule):
    """Points near a circle."""

    def __init__(self, count: int = 2048, batch_size: int = 64):
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self):
        random = torch.Generator().manual_seed(0)
        angles = 2 * math.pi * torch.rand(self.count, 1, generator=random)
        points = torch.cat([angles.cos(), angles.sin()], dim=1)
        points = points + 0.05 * torch.randn(points.shape, generator=random)
        return DataLoader(list(points), batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Gan, Ring)
