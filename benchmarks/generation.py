"""Tokens per second of greedy generation with a cache, on four layouts, against one process.

A hook between two steps of training writes texts with the reference GPT, in float32. One process
is rank 0 alone, whose model is whole; the other rank waits.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _gpt import BenchModule, loader
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from lightning.pytorch.callbacks import Callback

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT
from lightning_par.strategies import Hybrid3DStrategy

RANKS, ROWS, PROMPT, NEW = 2, 4, 16, 32
CONFIG = GPTConfig(
    vocab_size=8192,
    max_length=PROMPT + NEW,
    num_layers=8,
    model_dim=384,
    num_heads=8,
    tied_head=False,
)
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {**ONES, "tensor_parallel_size": 2},
    "pp 2": {**ONES, "pipeline_parallel_size": 2},
    "dp 2, ZeRO 3": {**ONES, "zero_stage": 3},
    "cp 2": {**ONES, "context_parallel_size": 2},
}


def write(model: GPT) -> None:
    """Write texts, the same on every rank."""
    prompt = torch.arange(ROWS * PROMPT).view(ROWS, PROMPT)
    model.generate(prompt, NEW, temperature=0.0)


class _Writing(Callback):
    """Takes turns, each of which is one call of `generate`."""

    def __init__(self, turn: Turn, arguments: Arguments) -> None:
        self._turn, self._count = turn, arguments.total_steps

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for _ in range(self._count):
            self._turn.next()
            write(pl_module.model)


class _Silent:
    """Is told of the steps of training, which do not count."""

    def next(self) -> None:
        """Do nothing."""


def body(arguments: Arguments) -> None:
    """Run on one rank."""

    def alone(turn: Turn) -> None:
        model = GPT(CONFIG)
        for _ in range(arguments.total_steps):
            turn.next()
            if dist.get_rank() == 0:
                write(model)

    def meshed(options: dict[str, Any], turn: Turn) -> None:
        strategy = Hybrid3DStrategy(**options, verify=False)
        data = loader(ROWS, tokens=PROMPT, vocab=CONFIG.vocab_size)
        writing = [_Writing(turn, arguments)]
        limits = {"max_epochs": 1, "max_steps": 1, "limit_train_batches": 1}
        module = BenchModule(CONFIG)
        fit(module, data, strategy, _Silent(), arguments, callbacks=writing, **limits)

    contenders = {name: partial(meshed, options) for name, options in LAYOUTS.items()}
    found = compare(
        f"{ROWS} texts of {NEW} tokens", {"one process": alone, **contenders}, arguments, targets={}
    )
    if dist.get_rank() == 0:
        for name, seconds in found.items():
            print(f"{name:12}  {ROWS * NEW / seconds:7.0f} tokens/s", flush=True)


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=RANKS)
