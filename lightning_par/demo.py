"""Demo behind ``make demo``: a small GPT on four CPU processes, pp 2 x tp 2.

It trains on the sources of Python's standard library, saves a checkpoint, draws the measured
pipeline timeline, and generates a few lines with the trained model on one process.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_par.models import GPTModule, TextDataModule
from lightning_par.profiling.timeline_plot import draw_timeline
from lightning_par.strategies import MeshStrategy

__all__ = ["main"]

_log = logging.getLogger(__name__)
_PROMPT = "def main(argv):\n    "


class _LossHistory(Callback):
    """Callback that keeps the loss of every step, and at the end the pipeline's timeline."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.timeline: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Append the loss that the step logged."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the timed actions of every stage."""
        # A collective, so every rank calls it although rank 0 alone draws.
        if isinstance(trainer.strategy, MeshStrategy):
            self.timeline = trainer.strategy.pipeline_timeline()


def main(argv: list[str] | None = None) -> None:
    """Train, draw, generate, and log where the files are.

    Args:
        argv: Command line without the program's name; None: that of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_par.demo", description=__doc__)
    parser.add_argument("--devices", type=int, default=4, help="processes on the CPU")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where files go")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    _log.setLevel(logging.INFO)
    # Deprecations inside Lightning, and advice on loaders that does not concern a demo.
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    pl.seed_everything(0, verbose=False)
    began = time.monotonic()
    history = _LossHistory()
    trainer = pl.Trainer(
        strategy="hybrid3d",
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.steps,
        limit_val_batches=8,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        enable_model_summary=False,
        logger=CSVLogger(options.out, name="logs"),
        callbacks=[
            history,
            TQDMProgressBar(refresh_rate=5),
            ModelCheckpoint(options.out, filename="gpt-{step}", save_last=False),
        ],
    )
    module = GPTModule(preset="tiny", warmup_steps=20, max_steps=options.steps)
    data = TextDataModule(length=128, batch_size=16)
    trainer.fit(module, data)
    if trainer.is_global_zero:
        _report(trainer, history, data, options.out, time.monotonic() - began)


def _report(
    trainer: pl.Trainer, history: _LossHistory, data: TextDataModule, out: Path, seconds: float
) -> None:
    strategy, checkpoint, logger = trainer.strategy, trainer.checkpoint_callback, trainer.logger
    assert isinstance(strategy, MeshStrategy)
    assert isinstance(checkpoint, ModelCheckpoint)
    assert isinstance(logger, CSVLogger)
    # The loss of one batch is noisy.
    first, last = history.losses[0], sum(history.losses[-10:]) / len(history.losses[-10:])
    lines = [
        "",
        f"Trained on {strategy.sizes.world_size} processes ({strategy.sizes}) for "
        f"{len(history.losses)} steps in {seconds:.0f} s.",
        f"Loss: {first:.2f} at the start, {last:.2f} over the last 10 steps (nats per byte; a "
        "uniform guess is 5.55).",
    ]
    if history.timeline:
        picture = draw_timeline(
            history.timeline, out / "pipeline.png", title="One training step, measured"
        )
        lines.append(f"Pipeline that ran: {picture}")
    sample = _generate(checkpoint.best_model_path, data)
    quoted = "\n".join("    | " + line for line in sample.splitlines())
    lines += [
        f"Checkpoint: {checkpoint.best_model_path} (any layout loads it, and so does "
        "GPTModule.load_from_checkpoint)",
        f"Losses: {logger.log_dir}/metrics.csv",
        "One process has loaded it and writes:",
        quoted,
    ]
    _log.info("\n".join(lines))


def _generate(path: str, data: TextDataModule) -> str:
    """Return a prompt continued on one process with the weights of a Lightning checkpoint file."""
    module = GPTModule.load_from_checkpoint(path, map_location="cpu")
    module.eval()
    prompt = torch.tensor([list(data.tokenizer.encode(_PROMPT))])
    generator = torch.Generator().manual_seed(0)
    tokens = module.model.generate(prompt, 200, temperature=0.7, top_k=40, generator=generator)
    return str(data.tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main()
