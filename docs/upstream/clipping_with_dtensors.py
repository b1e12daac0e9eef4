"""ModelParallelStrategy cannot clip where only some parameters are DTensors."""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset


class _Net(L.LightningModule):
    """Two layers that are divided, and one that is not."""

    def configure_model(self):
        up, down, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
        self.net = torch.nn.Sequential(up, down, head)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    options = {"max_steps": 1, "logger": False, "enable_checkpointing": False}
    clips = {"gradient_clip_val": 1.0}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **clips, **options)
    trainer.fit(_Net(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=8))
