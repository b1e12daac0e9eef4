"""Step time of `hybrid3d` on one device against the plain Trainer.

The reference GPT's own LightningModule: it logs, and steps a learning-rate schedule. A bare loop,
which does neither, shows what Lightning itself takes.
"""

import itertools

import torch.nn.functional as F
from _gpt import loader, make_optimizer
from _paired import Arguments, compare, fit, parse_arguments, Turn

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.lightning_module import GPTModule
from lightning_par.models.gpt.model import GPT
from lightning_par.strategies import Hybrid3DStrategy

BATCH_SIZE = 4
SIZES = {"vocab_size": 2048, "model_dim": 256, "num_heads": 8, "num_kv_heads": 4}


def body(arguments: Arguments) -> None:
    """Run in this process."""

    def plain(turn: Turn) -> None:
        fit(GPTModule(overrides=SIZES), loader(BATCH_SIZE), "auto", turn, arguments)

    def ours(turn: Turn) -> None:
        fit(GPTModule(overrides=SIZES), loader(BATCH_SIZE), Hybrid3DStrategy(), turn, arguments)

    def bare(turn: Turn) -> None:
        model = GPT(GPTConfig.preset("tiny", **SIZES))
        optimizer = make_optimizer(list(model.parameters()))
        batches = itertools.chain.from_iterable(itertools.repeat(loader(BATCH_SIZE)))
        for _ in range(arguments.total_steps):
            turn.next()
            batch = next(batches)
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    compare(
        "one device",
        {"plain Trainer": plain, "hybrid3d": ours, "bare loop": bare},
        arguments,
        targets={"hybrid3d": 1.03},
    )


if __name__ == "__main__":
    body(parse_arguments(__doc__))
