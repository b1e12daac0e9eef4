"""A training script as a user has it; run by test_launch.py with the name of a file for its result.

    python train_script.py RESULT DEVICES NODES FAIL HOW

FAIL is a global rank that in its second step raises (HOW is "raise") or is killed ("kill"), or -1.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_par  # noqa: F401 - registers the strategies
from tests.support.models.toy_gpt import loader, ToyData, ToyModule


class FailingModule(ToyModule):
    """Fails on one rank."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__("sgd")
        self.failing_rank, self.how = rank, how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == self.failing_rank:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"no key on {self.global_rank}")


def main() -> None:
    """Train for one epoch and leave the loss in a file."""
    gc.freeze()  # what is imported stays; the end is a second quicker
    result, devices, nodes, failing = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="hybrid3d",
        devices=devices,
        num_nodes=nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(FailingModule(failing, sys.argv[5]), loader(ToyData(12), 4), loader(ToyData(4), 4))
    found = {
        "loss": float(trainer.callback_metrics["train_loss"]),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "sizes": str(trainer.strategy.sizes),  # type: ignore[attr-defined]
        "threads": torch.get_num_threads(),
    }
    result.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
