"""Learning on real text: a dense GPT, mixtures of experts with the same active size, and BERT.

All GPTs read the same bytes (the sources of Python's standard library) in the same order; each
token passes as many weights, but for the routers' (8 x 64 per layer).
"""

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
from _learn import make_trainer, quiet
from lightning.pytorch.callbacks import Callback

from lightning_par.callbacks import ExpertBalance
from lightning_par.models import (
    BertModule,
    GPTModule,
    MixtralModule,
    SentenceDataModule,
    TextDataModule,
)

CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (GPTModule, {"ff_dim": 256}),
    "top-2 of 8, loss": (MixtralModule, {"ff_dim": 128}),
    "top-2 of 8, bias": (MixtralModule, {"ff_dim": 128, "balance": "bias"}),
    "top-2 of 8, no balance": (MixtralModule, {"ff_dim": 128, "balance": "none"}),
    "top-1 of 8, switch": (
        MixtralModule,
        {"ff_dim": 256, "routing": "switch", "experts_per_token": 1},
    ),
}


class _Losses(Callback):
    """Keeps the loss of training of every step, without the routers' part."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        loss = float(metrics["train_loss"])
        if "train_balance_loss" in metrics:
            config = pl_module.config
            loss -= config.auxiliary_weight * float(metrics["train_balance_loss"])
            loss -= config.z_weight * float(metrics["train_z_loss"])
        self.values.append(loss)


class _NotDrawn(ExpertBalance):
    def on_train_end(self, *_: Any) -> None:
        pass


def learn(module: pl.LightningModule, data: Any, steps: int, balance: Callback | None) -> str:
    """Train, and return the row of the table."""
    losses = _Losses()
    callbacks = [losses, *([balance] if balance else [])]
    trainer = make_trainer(steps, devices=1, log_every_n_steps=20, callbacks=callbacks)
    began = time.perf_counter()
    trainer.fit(module, data)
    spent = 1000 * (time.perf_counter() - began) / steps
    first, last = losses.values[0], statistics.mean(losses.values[-20:])
    validated = float(trainer.callback_metrics["val_loss"])
    row = f"{first:7.3f} {last:7.3f} {validated:7.3f}   {spent:6.0f}"
    if isinstance(balance, ExpertBalance):
        for layers in (balance.history[0], balance.history[-1]):
            found = [layer.measures() for layer in layers.values()]
            row += f"   {min(m['entropy'] for m in found):.3f}"
            row += f" {max(m['max_over_mean'] for m in found):5.2f}"
            row += f" {statistics.mean(m['dropped'] for m in found):6.3f}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS, "bert"])
    parser.add_argument("--picture", help="where the load of the experts is drawn (top-2, loss)")
    options = parser.parse_args()
    quiet()
    print("then, in the first and the last 20 steps: least entropy of a layer, largest load over")
    print("mean load, share of dropped tokens")
    print(f"{'':24}  params  active   first    last     val  ms/step")
    for name, (kind, overrides) in CONTENDERS.items():
        if options.only and name not in options.only:
            continue
        pl.seed_everything(0, verbose=False)
        module = kind("tiny", overrides=overrides, max_steps=options.steps, warmup_steps=20)
        is_mixture = kind is MixtralModule
        picture = options.picture if name == "top-2 of 8, loss" else None
        balance = (ExpertBalance(picture) if picture else _NotDrawn()) if is_mixture else None
        sizes = f"{module.config.num_parameters:>8,} {module.config.linear_parameters:>7,}"
        row = learn(module, TextDataModule(length=128, batch_size=16), options.steps, balance)
        print(f"{name:22}  {sizes}  {row}", flush=True)
    if not options.only or "bert" in options.only:
        pl.seed_everything(0, verbose=False)
        bert = BertModule("tiny", max_steps=options.steps, warmup_steps=20)
        row = learn(bert, SentenceDataModule(length=128, batch_size=16), options.steps, None)
        print(f"{'BERT, MLM and order':22}  {bert.config.num_parameters:>8,} {'':>7}  {row}")


if __name__ == "__main__":
    main()
