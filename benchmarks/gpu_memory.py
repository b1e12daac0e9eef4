"""Memory of one CUDA device against the estimate, and how long a save stops the training there.

The estimate is of weights, gradients and states of the optimizer; it is compared with what is
allocated where all of them are there and activations are not: at the end of a step.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _gpt import BenchModule, CONFIG, loader
from lightning.pytorch.callbacks import Callback

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.memory.estimate import estimate_memory
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT
from lightning_par.plan.resolved_plan import resolve_plan
from lightning_par.sizes import ParallelSizes

_GIB = 2**30
CLOSE = 0.05
"""Of the estimate."""


class Held(Callback):
    """Notes what is allocated at the end of a step; gradients are freed in the next."""

    most = 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Called after the step of the optimizer."""
        self.most = max(self.most, torch.cuda.memory_allocated())


def train(case: GPTConfig, held: Held, **options: Any) -> pl.Trainer:
    """Return a Trainer after three steps."""
    torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        precision="bf16-mixed",
        strategy=Hybrid3DStrategy(gather_after_run=False, **options),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[held],
    )
    trainer.fit(BenchModule(case), loader(4, vocab=case.vocab_size, pin=True))
    return trainer


def estimated(case: GPTConfig) -> int:
    """Return the bytes that weights, gradients and states of AdamW take by the estimate."""
    with torch.device("meta"):
        model = GPT(case)
    resolved = resolve_plan(model, model.parallel_plan())
    return estimate_memory(model, resolved, ParallelSizes(), zero_stage=0, offload=None).device


def main() -> None:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the GPT of the other benchmarks")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    case = CONFIG if options.tiny else GPTConfig.preset("gpt2")
    wanted = estimated(case)
    for name, more in {"one file": {}, "in the background": {"async_save": True}}.items():
        before = torch.cuda.memory_allocated()
        held = Held()
        trainer = train(case, held, **more)
        found, peak = held.most - before, torch.cuda.max_memory_allocated() - before
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            trainer.save_checkpoint(Path(folder, "one.ckpt"))
            stall = time.perf_counter() - began
            trainer.strategy.finish_saving()
            whole = time.perf_counter() - began
        print(f"{name}: a save stops the training for {stall:.3f} s, is there after {whole:.3f} s")
        error = found / wanted - 1
        verdict = f"target {CLOSE:.0%}, {'met' if abs(error) <= CLOSE else 'missed'}"
        sizes = f"estimate {wanted / _GIB:.3f} GiB, held {found / _GIB:.3f} GiB"
        print(f"{sizes}: {error:+.1%}, {verdict}")
        print(f"peak, with activations: {peak / _GIB:.3f} GiB")
        trainer.strategy.teardown()
        del trainer, held
        gc.collect()  # a Trainer and its module refer to each other


if __name__ == "__main__":
    main()
