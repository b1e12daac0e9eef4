"""A run that real ranks and rehearsed ones build alike."""

import lightning as L

from lightning_par.models import GPTModule, TextDataModule
from lightning_par.strategies.presets import Hybrid3DStrategy

WIDTH = 64


def build(sizes, plugins=(), callbacks=(), *, devices=8, num_nodes=1, overrides=None, **options):
    """Return Trainer, module and data of one training step of a small GPT of five blocks."""
    strategy = Hybrid3DStrategy(**{"gather_after_run": False, "verify": False, **sizes})
    given = {
        "accelerator": "cpu",
        "devices": devices,
        "num_nodes": num_nodes,
        "strategy": strategy,
        "plugins": list(plugins),
        "callbacks": list(callbacks),
        "max_steps": 1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(**{**given, **options})
    module = GPTModule(overrides={"num_layers": 5, "model_dim": WIDTH, **(overrides or {})})
    data = TextDataModule(length=48, batch_size=6, max_bytes=200_000)
    return trainer, module, data
