"""The measurements of ``calibrate``, in a Trainer, which starts the ranks."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_par.profiling.calibration import measure

__all__ = ["Measurement"]


class Measurement(pl.LightningModule):
    """Measures where a prediction would begin: the ranks and their group are there.

    Args:
        dtype: Of products and messages; "auto": bfloat16 on a GPU, float32 on a CPU.
        round_seconds: Of a round of each measurement.
    """

    def __init__(self, dtype: str, round_seconds: float) -> None:
        super().__init__()
        self._asked, self._seconds = dtype, round_seconds

    @override
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Measure; what is returned is not kept, but Lightning asks for something."""
        device = self.trainer.strategy.root_device
        self.kind = self._asked
        if self.kind == "auto":
            self.kind = "float32" if device.type == "cpu" else "bfloat16"
        # A prediction runs without gradients; a training step, which is measured, needs them.
        dtype, devices = getattr(torch, self.kind), self.trainer.num_devices
        with torch.inference_mode(False), torch.enable_grad():
            self.found = measure(device, dtype, devices, round_seconds=self._seconds)
        return batch
