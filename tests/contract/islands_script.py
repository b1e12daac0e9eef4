"""A script whose islands are its devices; run by test_islands_strategy.py.

    python islands_script.py RESULT

Trains three times; in the third run island 1 is killed after its fourth step.
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
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

from lightning_par import IslandsStrategy
from lightning_par.callbacks import IslandMonitor
from tests.contract.test_islands_strategy import Regression, SEED, STEPS


class HalfBatches(Regression):
    """Draws half of the samples of a step on each of two islands."""

    killed = False

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        torch.manual_seed(0)
        return DataLoader(RandomDataset(32, 64), batch_size=2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.killed and batch_idx == 4 and os.environ.get("LOCAL_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train three times and leave what was found in a file of this island."""
    gc.freeze()  # what is imported stays; the end is a second quicker
    torch.set_default_dtype(torch.float64)
    island, runs = os.environ.get("LOCAL_RANK", "0"), []
    path = Path(sys.argv[1]).with_suffix(f".{island}")
    for turn in range(3):
        pl.seed_everything(SEED)
        module = HalfBatches()
        module.killed = turn == 2
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        monitor = IslandMonitor(path.with_name("islands.svg"))
        trainer = pl.Trainer(
            strategy=IslandsStrategy(outer={"every": 1, "optimizer": "sgd", "quantize": "none"}),
            accelerator="cpu",
            devices=2,
            max_epochs=2 if module.killed else 1,
            limit_val_batches=4,
            callbacks=[monitor],
            **options,
        )
        trainer.fit(module)
        runs.append(
            {
                "weight": module.layer.weight.tolist(),
                "val_loss": float(trainer.callback_metrics["val_loss"]),
                "steps": trainer.global_step,
                "world": trainer.world_size,
                "rounds": float(trainer.callback_metrics["islands/rounds"]),
                "agreement": float(trainer.callback_metrics["islands/agreement"]),
                "contributing": [exchange.islands for exchange in monitor.exchanges],
            }
        )
        left = [name for name in os.environ if name.startswith("LIGHTNING_PAR_I")]
        path.write_text(json.dumps({"runs": runs, "variables": left}))
    assert runs[-1]["steps"] == 2 * STEPS


if __name__ == "__main__":
    main()
