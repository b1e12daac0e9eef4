"""A run that stops and resumes sees the same batches as one that does not stop."""

import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_par.models import TextDataModule
from lightning_par.models.data.resumable_loader import ReplicaSampler, ResumableLoader
from lightning_par.models.data.token_windows import WindowDataset

LENGTH = 7
HOOKS = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")


class Recorder(L.LightningModule):
    """Writes down the first two tokens of every sample of every training batch."""

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


def data(folder: Path, workers: int = 0) -> TextDataModule:
    text = "".join(chr(33 + (7 * i + i // 90) % 90) for i in range(1200))
    (folder / "corpus.txt").write_text(text)
    paths = [str(folder / "corpus.txt")]
    return TextDataModule(paths, length=LENGTH, batch_size=5, num_workers=workers, seed=3)


def fit(
    module: L.LightningModule,
    data: object,
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


MID_EPOCH = "on_train_batch_end"
AFTER_VALIDATION = "on_validation_end"
END_OF_EPOCH = "on_train_epoch_end"
SHORT = {"limit_train_batches": 9}
OFTEN = {"val_check_interval": 5}


@pytest.mark.parametrize(
    ("hook", "workers", "options", "asks_for_steps"),
    [
        *((hook, 0, options, False) for hook in HOOKS for options in ({}, SHORT, OFTEN)),
        *((MID_EPOCH, 0, options, True) for options in ({}, SHORT, OFTEN)),
        (MID_EPOCH, 2, {}, False),
        (MID_EPOCH, 2, SHORT, True),
        (END_OF_EPOCH, 2, {}, False),
        (AFTER_VALIDATION, 2, OFTEN, False),
    ],
    ids=str,
)
def test_resumed_run_sees_the_batches_that_an_uninterrupted_run_sees(
    tmp_path: Path, hook: str, workers: int, options: dict[str, object], asks_for_steps: bool
) -> None:
    whole = Recorder(asks_for_steps=asks_for_steps)
    save = SaveOn(hook, 5, tmp_path / "a.ckpt")
    fit(whole, data(tmp_path, workers), [save], **options)
    resumed = Recorder(asks_for_steps=asks_for_steps)
    fit(resumed, data(tmp_path, workers), [], tmp_path / "a.ckpt", **options)
    per_epoch = 9 if options is SHORT else 30
    assert len(whole.seen) == 3 * per_epoch
    assert save.at == (per_epoch if hook == END_OF_EPOCH else save.at) < len(whole.seen)
    assert whole.seen[save.at :] == resumed.seen
    assert whole.seen[:per_epoch] != whole.seen[per_epoch : 2 * per_epoch]


def test_run_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    whole = Recorder()
    fit(whole, data(tmp_path), [])
    seen: list[tuple[int, ...]] = []
    resume = None
    for part, steps in enumerate((4, 7, 31, 61, 90)):
        module = Recorder()
        save = SaveOn("on_train_end", 1, tmp_path / f"{part}.ckpt")
        fit(module, data(tmp_path), [save], resume, max_steps=steps, max_epochs=-1)
        seen += module.seen
        resume = tmp_path / f"{part}.ckpt"
    assert seen == whole.seen


def test_loader_without_a_data_module_resumes_too(tmp_path: Path) -> None:
    def loader() -> ResumableLoader[dict[str, Tensor]]:
        samples = WindowDataset(np.arange(201, dtype=np.uint16), [(0, 201)], 5)
        return ResumableLoader(samples, batch_size=3, sampler=ReplicaSampler(samples, seed=4))

    whole, resumed = Recorder(), Recorder()
    fit(whole, loader(), [SaveOn(MID_EPOCH, 5, tmp_path / "a.ckpt")])
    fit(resumed, loader(), [], tmp_path / "a.ckpt")
    assert whole.seen[5:] == resumed.seen


def test_overfitting_replaces_the_sampler_and_still_trains(tmp_path: Path) -> None:
    module = Recorder()
    fit(module, data(tmp_path), [], overfit_batches=2)
    assert module.seen[:2] == module.seen[2:4] == module.seen[4:]
