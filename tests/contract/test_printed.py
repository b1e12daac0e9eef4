"""On one device a run prints what a plain Trainer prints, also where it ends by an exception."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import sys
import torch
import lightning.pytorch as pl
import lightning_par  # registers the strategies
from torch.utils.data import DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            raise KeyError("of the user")
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(strategy):
    torch.manual_seed(0)
    loader = DataLoader(torch.ones(4, 3), 2)
    for epochs in (1, 2):  # the second run raises
        module = Module()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )
        trainer.fit(module, loader, loader)
        trainer.validate(module, loader)

# Each in a process of its own, to the end of the interpreter; what they import is there already.
for strategy in ("auto", "hybrid3d"):
    if os.fork() == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{sys.argv[1]}/{strategy}.{number}", os.O_CREAT | os.O_WRONLY), number)
        train(strategy)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
"""


def _lines(folder: Path, strategy: str) -> list[str]:
    said, text = ((folder / f"{strategy}.{number}").read_text() for number in (1, 2))
    # Of a traceback, frames and marks below them differ: a strategy adds frames of its own.
    text = re.sub(r'^ +(File ".*|[~^]+|.*\n +[~^]+)\n', "", text, flags=re.M)
    text = re.sub(r"^    .*\n", "", text, flags=re.M)
    return [*said.splitlines(), *text.splitlines()]


def test_a_run_on_one_device_prints_what_a_plain_trainer_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    wanted = _lines(tmp_path, "auto")
    assert wanted[-1] == "KeyError: 'of the user'"
    assert _lines(tmp_path, "hybrid3d") == wanted
