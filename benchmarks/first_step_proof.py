"""What the proof of the first step costs: seconds, and bytes of memory on rank 0.

The reference models, on 2 gloo ranks, with the proof and without; each number is of ranks of its
own. A run takes one step; both are timed from the start of the batch to the end of its step.
"""

import argparse
import json
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _gpt import BenchModule, loader, TOKENS
from _paired import Arguments, launch
from lightning.pytorch.callbacks import Callback

from lightning_par.engine.memory.measured import peak_memory
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.strategies import Hybrid3DStrategy
from lightning_par.strategies.proof import skeleton

ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {**ONES, "tensor_parallel_size": 2},
    "pp 2": {**ONES, "pipeline_parallel_size": 2},
    "dp 2, ZeRO 3": {**ONES, "data_parallel_size": 2, "zero_stage": 3},
    "cp 2": {**ONES, "context_parallel_size": 2},
}
SIZES = {
    "tiny": GPTConfig(vocab_size=64, num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2),
    "4 M": GPTConfig(
        vocab_size=2048, num_layers=4, model_dim=256, num_heads=8, num_kv_heads=4, tied_head=False
    ),
    "30 M": GPTConfig(
        vocab_size=8192, num_layers=8, model_dim=512, num_heads=8, num_kv_heads=4, tied_head=False
    ),
    "300 M": GPTConfig(
        vocab_size=32_768, num_layers=20, model_dim=1024, num_heads=16, tied_head=False
    ),
}


_VERIFY = ("auto", "first_step", "by blocks")


class _Clock(Callback):
    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.seconds


def body(_: Arguments, *, layout: str, size: str, verify: Any, tokens: int, file: str) -> None:
    """Run on one rank."""
    warnings.simplefilter("ignore")
    clock, config = _Clock(), SIZES[size]
    if verify == "by blocks":  # as models that are too large for one process
        verify, skeleton.LARGEST = "auto", 0
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=verify)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(BenchModule(config), loader(8, tokens=tokens, vocab=config.vocab_size))
    if trainer.global_rank == 0:
        found: dict[str, Any] = {"seconds": clock.seconds, "peak": peak_memory(torch.device("cpu"))}
        found["outcome"] = strategy.start.proof.outcome
        Path(file).write_text(json.dumps(found))


def measure(layout: str, size: str, verify: Any, tokens: int) -> dict[str, Any]:
    """Return seconds, peak bytes and outcome of a run of one step."""
    nothing = Arguments(pairs=0, steps=0, warmup=0, profile=False)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/found.json"
        run = partial(body, layout=layout, size=size, verify=verify, tokens=tokens, file=file)
        launch(run, nothing, ranks=2)
        found: dict[str, Any] = json.loads(Path(file).read_text())
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--verify", default=["first_step"], nargs="+", choices=_VERIFY)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="T")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args()
    print("| model | layout | first step, s | with the proof, s | more memory on rank 0, MiB | |")
    print("|---|---|---|---|---|---|")
    for size in options.sizes:
        for layout in options.layouts:
            plain = measure(layout, size, False, options.tokens)
            for verify in options.verify:
                proved = measure(layout, size, verify, options.tokens)
                more = f"{(proved['peak'] - plain['peak']) / 2**20:.0f}"
                seconds = f"{plain['seconds']:.2f} | {proved['seconds']:.2f}"
                print(
                    f"| {size} | {layout} | {seconds} | {more} | {proved['outcome']} |", flush=True
                )


if __name__ == "__main__":
    main()
