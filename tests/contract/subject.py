"""What the contract tests train: a module that uses much of Lightning, and its layouts."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.support.models.toy_gpt import loader, ToyData, ToyModule, VOCAB

SEED = 1

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    "pp2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    "dp2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 2},
}


class TalkativeModule(ToyModule):
    """Logs in every way, keeps torchmetrics, and has a scheduler.

    Args:
        scheduler: "step", "epoch" or "plateau".
        optimizer: "adamw" or "sgd".
        blocks: Of the model.
    """

    def __init__(self, scheduler: str = "epoch", optimizer: str = "adamw", blocks: int = 4) -> None:
        super().__init__(optimizer=optimizer, blocks=blocks)
        self.save_hyperparameters()
        self.scheduler = scheduler
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")
        self.by_hand = MeanMetric()
        self.seen = SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch["ids"])
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log(
            "samples", float(len(batch["ids"])), reduce_fx="SUM", on_epoch=True, sync_dist=True
        )
        top = batch["ids"].max().to(loss.dtype)
        self.log("top", top, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"loss_copy": loss, "twice": 2 * loss}, sync_dist=True)
        self.seen(batch["ids"].to(loss.dtype))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "first": batch["ids"][:, 0], "note": "kept"}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        logits = self.model(batch["ids"])
        flat, labels = logits.view(-1, logits.size(-1)), batch["labels"].flatten()
        loss = F.cross_entropy(flat, labels)
        self.log(f"{stage}_loss", loss, sync_dist=True, prog_bar=True)
        self.accuracy(flat, labels)
        self.log(f"{stage}_accuracy", self.accuracy)
        self.by_hand.update(loss, len(batch["ids"]))

    def on_validation_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self.scheduler == "plateau":
            made = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": made, "monitor": "val_loss"},
            }
        made = schedulers.StepLR(optimizer, step_size=2, gamma=0.7)
        return [optimizer], [{"scheduler": made, "interval": self.scheduler}]


class Diary(Callback):
    """Writes down what callbacks are given."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.progress: list[dict[str, float]] = []
        self.rates: list[float] = []
        self.calls: list[str] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append({**outputs, "loss": float(outputs["loss"])})
        shown = trainer.progress_bar_metrics
        self.progress.append({k: float(v) for k, v in shown.items() if k != "v_num"})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.calls.append("train")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("sanity" if trainer.sanity_checking else "val")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.calls.append("v")


def data(size: int, batch_size: int, replicas: int) -> DataLoader[Any]:
    """A loader whose whole batches are the same for any number of replicas.

    Args:
        size: Samples.
        batch_size: Of the whole batch.
        replicas: Among which it is divided; 0 for one process.
    """
    return loader(ToyData(size), batch_size // max(replicas, 1))


def files(folder: Path) -> list[str]:
    """Names of all files below a folder; a checkpoint that is a folder counts as one."""
    found = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file() or p.is_symlink()}
    tops = {next((q for q in (p, *p.parents) if q.suffix == ".ckpt"), p) for p in found}
    return sorted(map(str, tops))


def numbers(metrics: Any) -> dict[str, float]:
    """The metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}
