"""A generative adversarial network as a user writes it: two optimizers, stepped by hand."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import ParallelPlan

__all__ = ["Gan", "vectors"]

LATENT, WIDTH, SIZE = 3, 10, 4


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class _Net(nn.Module):
    """Two blocks, and a map before and after them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Gan(pl.LightningModule):
    """Vectors of 4 numbers from 3; cases change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = _Net(LATENT, SIZE), _Net(SIZE, 1)

    def fake(self, real: Tensor) -> Tensor:
        """As many vectors as there are real ones."""
        return self.generator(torch.randn(len(real), LATENT, dtype=real.dtype, device=real.device))

    def judge(self, x: Tensor, is_real: bool) -> Tensor:
        """The loss of the critic where it has to say whether they are real."""
        logits = self.critic(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()

        self.toggle_optimizer(first)
        loss = self.judge(self.fake(real), True)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        critic_loss = (self.judge(real, True) + self.judge(self.fake(real).detach(), False)) / 2
        second.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(second, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        second.step()
        self.untoggle_optimizer(second)

        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("loss", loss + critic_loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        # A weight decay moves what should have no gradient in a step.
        first = torch.optim.SGD(self.generator.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
        second = torch.optim.AdamW(self.critic.parameters(), lr=1e-2, weight_decay=0.2, eps=1e-6)
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (first, second)]
        return [first, second], rates

    def parallel_plan(self) -> ParallelPlan:
        """The plan of all networks."""
        tensor: dict[str, Any] = {}
        nets = [name for name, _ in self.named_children()]
        for mlp in (f"{net}.blocks.*.mlp" for net in nets):
            tensor |= {mlp: "gather_sequence", f"{mlp}.up": "colwise", f"{mlp}.down": "rowwise"}
        return ParallelPlan(
            blocks=tuple(f"{net}.blocks" for net in nets), tensor=tensor, sequence_region="none"
        )


def vectors(count: int = 32) -> list[Tensor]:
    """Samples around a point."""
    return list(torch.randn(count, SIZE, dtype=torch.float64) * 0.3 + 1)
