"""Step time of `hybrid3d` on one device against the plain Trainer.

The reference GPT's own LightningModule: it logs, and steps a learning-rate schedule.
"""

from _gpt import loader
from _paired import Arguments, compare, fit, parse_arguments, Turn

from lightning_par.models.gpt_module import GPTModule
from lightning_par.strategies import Hybrid3DStrategy

BATCH_SIZE = 4
SIZES = {"vocab_size": 2048, "model_dim": 256, "num_heads": 8, "num_kv_heads": 4}


def body(arguments: Arguments) -> None:
    """Run in this process."""

    def plain(turn: Turn) -> None:
        fit(GPTModule(overrides=SIZES), loader(BATCH_SIZE), "auto", turn, arguments)

    def ours(turn: Turn) -> None:
        fit(GPTModule(overrides=SIZES), loader(BATCH_SIZE), Hybrid3DStrategy(), turn, arguments)

    compare(
        "one device",
        {"plain Trainer": plain, "hybrid3d": ours},
        arguments,
        targets={"hybrid3d": 1.03},
    )


if __name__ == "__main__":
    body(parse_arguments(__doc__))
