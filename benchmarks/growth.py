"""What a model of more blocks costs the host: set-up, first step, later steps and a save.

    python -m benchmarks.growth [--layouts one dp2 zero3 tp2 pp2] [--blocks 16 64 128]

A GPT of dim 16 on 8 tokens, so small that nearly all time is the host's. Each number is CPU seconds
(user and system, all threads) of rank 0, which another load on the machine changes little. Each
contender trains in ranks forked anew from a process that has imported everything.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as the other scripts, which are run as files

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from _gpt import BenchModule, loader, make_optimizer
from _paired import Arguments, launch
from against_fsdp import CPUFSDPStrategy
from against_model_parallel import TorchPlanModule
from against_torch_pipeline import loss_of, torch_step, TorchStage
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import Block, GPT
from lightning_par.strategies import Hybrid3DStrategy

VOCAB, TOKENS, BATCH, STEPS = 32, 8, 8, 8
PHASES = ("set-up", "first step", "later step", "save")

Found = dict[str, float]


def config_of(blocks: int) -> GPTConfig:
    """Return the sizes of a model of so many blocks."""
    return GPTConfig(
        vocab_size=VOCAB,
        num_layers=blocks,
        model_dim=16,
        num_heads=2,
        num_kv_heads=2,
        tied_head=False,
    )


@dataclass
class Clock(Callback):
    """Notes the CPU seconds of this process at the ends of phases."""

    began: float = 0.0

    def __post_init__(self) -> None:
        self.marks: list[float] = []

    def mark(self) -> None:
        """Note the time now."""
        self.marks.append(time.process_time())

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self.mark()

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self.mark()

    def found(self) -> Found:
        """Return the seconds of each phase."""
        starts, ends = self.marks[::2], self.marks[1::2]
        steps = [end - start for start, end in zip(starts, ends, strict=True)]
        later = statistics.median(steps[2:])
        return {
            "set-up": starts[0] - self.began,
            "first step": steps[0] - later,
            "later step": later,
        }


def train(module: pl.LightningModule, strategy: Any, *, save: bool) -> Found:
    """Train by a Trainer that does nothing else."""
    clock = Clock(began=time.process_time())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    batch = BATCH if trainer.world_size == 1 or not _replicas(strategy) else BATCH // 2
    trainer.fit(module, loader(batch, tokens=TOKENS, vocab=VOCAB))
    found = clock.found()
    if save:
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            trainer.save_checkpoint(Path(folder, "model.ckpt"))
            found["save"] = time.process_time() - start
    return found


def _replicas(strategy: Any) -> bool:
    return isinstance(strategy, DDPStrategy | CPUFSDPStrategy) or (
        isinstance(strategy, Hybrid3DStrategy) and strategy.options.zero_stage in (0, 3)
    )


def ours(blocks: int, **sizes: Any) -> Found:
    """Train by a strategy of this package."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **sizes}
    single = all(value == 1 for value in sizes.values())
    return train(BenchModule(config_of(blocks)), Hybrid3DStrategy(**sizes), save=single)


def plain(blocks: int) -> Found:
    """Train by a plain Trainer."""
    return train(BenchModule(config_of(blocks)), "auto", save=True)


def ddp(blocks: int) -> Found:
    """Train by Lightning's DDPStrategy."""
    return train(BenchModule(config_of(blocks)), DDPStrategy(), save=False)


def fsdp(blocks: int) -> Found:
    """Train by Lightning's FSDPStrategy."""
    policy = ModuleWrapPolicy({Block})
    strategy = CPUFSDPStrategy(auto_wrap_policy=policy, sharding_strategy="FULL_SHARD")
    return train(BenchModule(config_of(blocks)), strategy, save=False)


def model_parallel(blocks: int) -> Found:
    """Train by Lightning's ModelParallelStrategy."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    return train(TorchPlanModule(config_of(blocks)), strategy, save=False)


def torch_pipeline(blocks: int) -> Found:
    """Train by torch's Schedule1F1B in a bare loop."""
    clock = Clock(began=time.process_time())
    rank, config = dist.get_rank(), config_of(blocks)
    module = TorchStage(GPT(config), rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_of)
    optimizer = make_optimizer(list(module.parameters()))
    batches = iter(loader(BATCH, tokens=TOKENS, vocab=VOCAB))
    for _ in range(STEPS):
        batch = next(batches)
        clock.mark()
        torch_step(schedule, optimizer, batch)
        clock.mark()
    return clock.found()


LAYOUTS: Mapping[str, tuple[int, Mapping[str, Callable[[int], Found]]]] = {
    "one": (1, {"plain Trainer": plain, "ours": ours}),
    "dp2": (2, {"DDPStrategy": ddp, "ours": partial(ours, zero_stage=0)}),
    "zero3": (2, {"FSDPStrategy": fsdp, "ours": partial(ours, zero_stage=3)}),
    "tp2": (
        2,
        {"ModelParallelStrategy": model_parallel, "ours": partial(ours, tensor_parallel_size=2)},
    ),
    "pp2": (
        2,
        {
            "Schedule1F1B": torch_pipeline,
            "ours": partial(ours, pipeline_parallel_size=2, num_microbatches=2),
        },
    ),
}
"""Layout -> its ranks, and what is compared: the peer first."""


def _body(run: Callable[[int], Found], blocks: int, out: Path, _: Arguments) -> None:
    torch.manual_seed(0)
    # The first collection after a fork copies every page of what was imported: no cost of a run.
    gc.collect()
    found = run(blocks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def measure(ranks: int, run: Callable[[int], Found], blocks: int) -> Found:
    """Return the seconds of each phase of one training in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        arguments = Arguments(pairs=1, steps=STEPS, warmup=0, profile=False)
        if ranks > 1:
            launch(partial(_body, run, blocks, out), arguments, ranks=ranks)
        else:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    _body(run, blocks, out, arguments)
                    code = 0
                finally:
                    os._exit(code)
            os.waitpid(child, 0)
        return dict(json.loads(out.read_text()))


def table(layout: str, sizes: Sequence[int]) -> list[str]:
    """Return the rows of a layout: each phase per block, and how it grows."""
    ranks, contenders = LAYOUTS[layout]
    found = {n: [measure(ranks, run, size) for size in sizes] for n, run in contenders.items()}
    first, second, last = sizes[0], sizes[-2], sizes[-1]
    rows = []
    for phase in PHASES:
        if any(phase not in each for runs in found.values() for each in runs):
            continue
        cells = {}
        for name, runs in found.items():
            at = {size: each[phase] for size, each in zip(sizes, runs, strict=True)}
            slope = (at[last] - at[first]) / (last - first)
            before, after = at[second] - at[first], at[last] - at[first]
            growth = math.nan
            if before > 0 and after > 0:
                growth = math.log(after / before) / math.log((last - first) / (second - first))
            cells[name] = (at[last], slope * 1000, growth)
        (peer, theirs), (_, own) = cells.items()
        rows.append(
            f"| {layout}, {phase} | {peer} | {own[1]:.2f} / {theirs[1]:.2f} | "
            f"{own[1] / theirs[1]:.2f}x | {own[2]:.2f} / {theirs[2]:.2f} | "
            f"{own[0]:.2f} / {theirs[0]:.2f} |"
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 64, 128])
    options = parser.parse_args()
    print("| | against | ms per block, ours / theirs | | exponent | seconds at the most blocks |")
    print("|---|---|---|---|---|---|")
    for layout in options.layouts:
        print("\n".join(table(layout, sorted(options.blocks))), flush=True)


if __name__ == "__main__":
    main()
