"""Validation of 5 samples on 2 ranks: Lightning's sampler repeats one, and the mean is another."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class _Mean(L.LightningModule):
    """Logs the mean of the samples."""

    def validation_step(self, batch):
        self.log("mean", batch[0].mean(), on_epoch=True, sync_dist=True, batch_size=len(batch[0]))


def validate(devices: int) -> float:
    data = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy="ddp_fork", **options)
    return trainer.validate(_Mean(), data, verbose=False)[0]["mean"]


if __name__ == "__main__":
    print(f"one process: {validate(1)}, two ranks: {validate(2)}")
