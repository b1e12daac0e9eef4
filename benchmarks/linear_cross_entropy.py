"""Logits in chunks against whole ones: bytes of a step by layout, and step time.

    python benchmarks/linear_cross_entropy.py [--pairs 7 --steps 2 --warmup 1] [--skip-time]

Bytes are those alive on the fullest rank in its second step, counted at every operation, before the
update; "loss" are those that are no weights, gradients or states. V is 131,072. The step time is
that of one device with V 32,768.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from _gpt import BenchModule, CONFIG, loader
from _paired import add_arguments, Arguments, compare, fit, launch, Turn
from lightning.pytorch.callbacks import Callback

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.observe.live_bytes import (
    ACTIVATIONS,
    GRADIENTS,
    LiveBytes,
    OPTIMIZER,
    PARAMETERS,
)
from lightning_par.strategies import Hybrid3DStrategy

SAMPLES, TOKENS = 8, 128
WIDE = replace(CONFIG, vocab_size=2**17, model_dim=128, num_heads=4, num_kv_heads=4, ff_dim=256)
NARROW = replace(CONFIG, vocab_size=2**15)
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": ONES,
    "tp 2": {**ONES, "tensor_parallel_size": 2},
    "tp 4": {**ONES, "tensor_parallel_size": 4},
    "pp 2, 4 micro-batches": {**ONES, "pipeline_parallel_size": 2, "num_microbatches": 4},
    "cp 2": {**ONES, "context_parallel_size": 2},
}


def ranks_of(options: dict[str, Any]) -> int:
    """Return the number of ranks of a layout."""
    sizes = (options.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline", "context"))
    return int(torch.tensor(list(sizes)).prod())


class SecondStep(Callback):
    """Notes the bytes by kind at the peak of the second step.

    Args:
        live: Counts them.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.peak, self.kinds = live, 0, dict[str, int]()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: object) -> None:
        """Begin with what the first step left."""
        self.live.mark(list(module.parameters()), PARAMETERS)
        self.live.mark([list(o.state.values()) for o in trainer.optimizers], OPTIMIZER)
        self.live.restart()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: object) -> None:
        """Take down forward and backward."""
        self.live.mark([p.grad for p in module.parameters()], GRADIENTS)
        self.peak, self.kinds = self.live.peak, self.live.kinds


def measure(path: Path, config: GPTConfig, options: dict[str, Any], _: Arguments) -> None:
    """Train for two steps; write peak and bytes of the loss of the fullest rank."""
    with LiveBytes() as live:
        seen = SecondStep(live)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=Hybrid3DStrategy(**options, verify=False, gather_after_run=False),
            callbacks=[seen],
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = loader(SAMPLES, tokens=TOKENS, vocab=config.vocab_size)
        trainer.fit(BenchModule(config), data)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (seen.peak, seen.kinds.get(ACTIVATIONS, 0)))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(max(found)))


def count(config: GPTConfig, options: dict[str, Any]) -> tuple[int, int]:
    """Return peak and bytes of the loss of the fullest rank of a layout."""
    arguments = Arguments(pairs=1, steps=1, warmup=0, profile=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes.json"
        launch(partial(measure, path, config, options), arguments, ranks=ranks_of(options))
        peak, loss = json.loads(path.read_text())
    return peak, loss


def print_bytes() -> None:
    """Print the bytes of every layout, with whole logits and with chunks."""
    print("| layout | logits of a rank, MB | loss, whole | in chunks | peak, whole | in chunks |")
    print("|---|---|---|---|---|---|")
    for name, options in LAYOUTS.items():
        parts = ranks_of(options) if "pp" not in name else options["num_microbatches"]
        logits = SAMPLES * TOKENS * WIDE.vocab_size * 4 / parts
        whole, chunks = (count(replace(WIDE, chunked_loss=on), options) for on in (False, True))
        row = [logits, whole[1], chunks[1], whole[0], chunks[0]]
        print(f"| {name} | " + " | ".join(f"{n / 1e6:,.0f}" for n in row) + " |", flush=True)


def time_steps(arguments: Arguments) -> None:
    """Print the step time of both."""

    def train(chunked: bool, turn: Turn) -> None:
        module = BenchModule(replace(NARROW, chunked_loss=chunked))
        data = loader(SAMPLES, tokens=TOKENS, vocab=NARROW.vocab_size)
        fit(module, data, "auto", turn, arguments)

    contenders = {"whole logits": partial(train, False), "in chunks": partial(train, True)}
    compare("one device, V 32,768", contenders, arguments, targets={"in chunks": 1.05})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--skip-time", action="store_true", help="count bytes only")
    parser.add_argument("--skip-bytes", action="store_true", help="measure times only")
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    skips = given.pop("skip_bytes"), given.pop("skip_time")
    if not skips[0]:
        print_bytes()
    if not skips[1]:
        time_steps(Arguments(**given))
