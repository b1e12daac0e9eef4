"""Ignored labels: ModelParallelStrategy averages the means of ranks, whatever they hold."""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class _Net(L.LightningModule):
    """A linear layer; prints the gradient of its bias, whole."""

    def configure_model(self):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 4)
        if torch.distributed.is_initialized():
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer):
        grad = self.net.bias.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        self.print(self.trainer.world_size, "ranks:", [round(v, 4) for v in whole.tolist()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int) -> None:
    torch.manual_seed(1)
    labels = torch.tensor([0, 1, 2, -100, 3, -100, 1, -100])
    data = DataLoader(TensorDataset(torch.randn(8, 3), labels), batch_size=8 // devices)
    options = {"max_steps": 1, "logger": False, "enable_checkpointing": False}
    strategy = ModelParallelStrategy(devices, 1) if devices > 1 else "auto"
    L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options).fit(_Net(), data)


if __name__ == "__main__":
    fit(1)
    fit(2)
