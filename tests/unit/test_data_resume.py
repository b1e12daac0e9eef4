"""A run that stops and resumes sees the same batches as one that does not stop."""

import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_par.models import TextDataModule
from lightning_par.models.loader import ReplicaSampler, ResumableLoader
from lightning_par.models.token_data import WindowDataset

LENGTH = 7


class Recorder(L.LightningModule):
    """Writes down the first token of every sample of every training batch."""

    def __init__(self, *, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []
        self.asks_for_steps = asks_for_steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(tuple(batch["input_ids"][:, :2].flatten().tolist()))
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SaveOn(Callback):
    """Saves once, in the given hook, after the given number of training batches."""

    def __init__(self, hook: str, batches: int, path: Path) -> None:
        self.batches, self.path, self.saved = batches, path, False
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        if len(module.seen) >= self.batches and not self.saved:
            self.saved = True
            self.at = len(module.seen)
            trainer.save_checkpoint(self.path)


def corpus(folder: Path) -> str:
    text = "".join(chr(33 + (7 * i + i // 90) % 90) for i in range(1200))
    (folder / "corpus.txt").write_text(text)
    return str(folder / "corpus.txt")


def fit(
    module: L.LightningModule,
    data: TextDataModule,
    callbacks: list[Callback],
    resume: Path | None = None,
    **trainer: object,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L.Trainer(
            **{
                "accelerator": "cpu",
                "devices": 1,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "max_epochs": 3,
                "num_sanity_val_steps": 1,
                "callbacks": callbacks,
                **trainer,
            }
        ).fit(module, data, ckpt_path=resume)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"limit_train_batches": 9}, {"val_check_interval": 5}], ids=str
)
@pytest.mark.parametrize("asks_for_steps", [False, True])
def test_resumed_run_sees_the_batches_that_an_uninterrupted_run_sees(
    tmp_path: Path, hook: str, workers: int, options: dict[str, object], asks_for_steps: bool
) -> None:
    def data() -> TextDataModule:
        return TextDataModule(
            [corpus(tmp_path)], length=LENGTH, batch_size=5, num_workers=workers, seed=3
        )

    whole = Recorder(asks_for_steps=asks_for_steps)
    save = SaveOn(hook, 5, tmp_path / "a.ckpt")
    fit(whole, data(), [save], **options)
    resumed = Recorder(asks_for_steps=asks_for_steps)
    fit(resumed, data(), [], tmp_path / "a.ckpt", **options)
    assert whole.seen[save.at :] == resumed.seen
    print(save.at, len(whole.seen))
