"""The hook of the user's in which an exception was raised."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par.strategies.processes.waiting_place import hook_of


class Failing(pl.LightningModule):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.layer, self.hook = torch.nn.Linear(1, 1), hook

    def fail(self, hook: str) -> None:
        if hook == self.hook:
            raise KeyError(hook)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.fail("on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    "hook",
    ["training_step", "on_train_batch_end", "validation_step", "on_validation_epoch_end"],
)
def test_the_hook_is_named_and_a_step_is_not(hook: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(torch.ones(2, 1))
    with pytest.raises(KeyError) as raised:
        trainer.fit(Failing(hook), loader, loader)
    found = hook_of(raised.value)
    assert found.startswith(f"{hook} (test_hook_of.py:") if hook.startswith("on_") else not found
