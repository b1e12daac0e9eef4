"""How many files of the package one steady training step enters, and how often it changes file.

A step of tp 2 x pp 2 on 4 gloo ranks, with clipping and a logged loss, under `sys.setprofile`. The
user's model is left out. The printed figures are those of the rank that enters most files.
"""

import argparse
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from _gpt import BenchModule, loader
from _paired import Arguments, launch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_par
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.strategies import Hybrid3DStrategy

STEADY = 4
"""Steps before the one that is counted: buffers are made, shapes are known."""
CONFIG = GPTConfig(vocab_size=64, num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2)
PACKAGE = Path(lightning_par.__file__).parent


class _Logging(BenchModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class _Entered(Callback):
    """Writes down which file every call of one step enters, from its batch to its end."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._names: dict[str, str | None] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        """Count from the end of one step to the end of the next."""
        sys.setprofile(self._note if trainer.global_step == STEADY else None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path not in self._names:
                self._names[path] = _inside(path)
            name = self._names[path]
            if name is not None:
                self.files.append(name)


def _inside(path: str) -> str | None:
    file = Path(path)
    if PACKAGE not in file.parents:
        return None
    relative = file.relative_to(PACKAGE)
    return None if relative.parts[0] == "models" else str(relative)


def body(_: Arguments) -> None:
    """Run on one rank."""
    warnings.simplefilter("ignore")
    entered = _Entered()
    strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_steps=STEADY + 2,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[entered],
    )
    trainer.fit(_Logging(CONFIG), loader(8, vocab=CONFIG.vocab_size))
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, entered.files)
    if dist.get_rank() == 0:
        _print(found)


def _print(found: list[list[str]]) -> None:
    most = max(found, key=lambda files: (len(set(files)), len(files)))
    changes = [sum(a != b for a, b in pairwise(files)) for files in found]
    for name, count in sorted(Counter(most).items()):
        print(f"{count:6d} calls  {name}")
    everywhere = set().union(*found)
    print(f"files: {len(set(most))} on the rank that enters most, {len(everywhere)} on any rank")
    print(f"changes of file: at most {max(changes)}, by rank {changes}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    launch(body, Arguments(pairs=1, steps=1, warmup=0, profile=False), ranks=4)
