"""Runs of a tied GPT that stop and go on in another layout."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_par.models import GPTModule, TextDataModule
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks

Run = dict[str, Any]

GLOBAL_BATCH = 4
# Odd sizes: shards of the vocabulary and of the replicas are unequal.
SIZES = {
    "vocab_size": 257,
    "model_dim": 12,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ff_dim": 10,
    "num_layers": 5,
    "max_length": 6,
    "bias": True,
}


def sizes(tensor: int = 1, pipeline: int = 1, data: int = 1, zero: int = 1) -> Run:
    """Options of a strategy."""
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
        "zero_stage": zero,
    }


PLAIN = "plain"
"""A Trainer without a strategy of ours."""
LAYOUTS: dict[str, Run] = {
    "one": sizes(),
    "tp2": sizes(tensor=2),
    "pp2": sizes(pipeline=2),
    "dp2 zero 1": sizes(data=2),
    "dp2 zero 3": sizes(data=2, zero=3),
    "tp2 pp2": sizes(tensor=2, pipeline=2),
    "tp2 dp2": sizes(tensor=2, data=2),
    "pp2 dp2": sizes(pipeline=2, data=2, zero=2),
    "tp2 pp2 dp2": sizes(tensor=2, pipeline=2, data=2, zero=3),
    "zbv": {**sizes(pipeline=2), "schedule": "zbv"},
    "dp2 offload": {**sizes(data=2, zero=2), "offload_options": {}},
    "tp2 offload": {**sizes(tensor=2), "offload_options": {}},
}


def world_of(layout: str) -> int:
    """Number of ranks."""
    options = LAYOUTS.get(layout, {})
    axes = ("tensor", "pipeline", "data")
    found = 1
    for axis in axes:
        found *= options.get(f"{axis}_parallel_size", 1)
    return found


class Witness(Callback):
    """Keeps what was loaded and the losses, and saves after a step."""

    def __init__(self, save_at: int, save_to: Path | None) -> None:
        self.save_at, self.save_to = save_at, save_to
        self.loaded: Run = {}
        self.saved: Run = {}
        self.losses: list[float] = []
        self.batches: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loaded = whole_state(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch["input_ids"].clone())
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == self.save_at:
            self.saved = whole_state(trainer)
            if self.save_to is not None:
                trainer.save_checkpoint(self.save_to)


def whole_state(trainer: Any) -> Run:
    """What one process would hold, on rank 0; the rates and the place in the data on every rank."""
    strategy, module = trainer.strategy, trainer.lightning_module
    if hasattr(strategy, "gather_state_dict"):
        weights = strategy.gather_state_dict()
        states = strategy.parallel_model.states
        with strategy.parallel_model.in_parallel_form():
            optimizers = [states.gather_optimizer(module, o) for o in trainer.optimizers]
    else:
        weights, optimizers = module.state_dict(), [o.state_dict() for o in trainer.optimizers]
    kept = {
        "weights": {k: v.detach().clone() for k, v in weights.items()},
        "optimizers": [
            {"groups": o["param_groups"], "state": {k: dict(v) for k, v in o["state"].items()}}
            for o in optimizers
            if o
        ],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "data": trainer.datamodule.state_dict(),
        "step": trainer.global_step,
    }
    for optimizer in kept["optimizers"]:
        for state in optimizer["state"].values():
            for name, value in state.items():
                state[name] = value.detach().clone()
    return kept


def make_data(folder: Path, replicas: int, workers: int = 0) -> TextDataModule:
    """Windows of a text; the global batch does not depend on the number of replicas."""
    text = folder / "corpus.txt"
    if not text.exists():
        text.write_text("".join(chr(33 + (7 * i + i // 90) % 90) for i in range(1500)))
    return TextDataModule(
        [str(text)],
        length=SIZES["max_length"],
        batch_size=GLOBAL_BATCH // replicas,
        num_workers=workers,
        seed=3,
    )


def make_trainer(layout: str, world: int, callbacks: list[Callback], **options: Any) -> pl.Trainer:
    """A quiet Trainer in float64 under a layout."""
    import lightning_par

    torch.set_default_dtype(torch.float64)
    of_trainer = {"max_epochs": -1, "precision": "64-true", **options.pop("trainer", {})}
    strategy: Any = "auto"
    if layout != PLAIN:
        strategy = lightning_par.Hybrid3DStrategy(**LAYOUTS[layout], **options)
    return quiet_trainer(strategy=strategy, devices=world, callbacks=callbacks, **of_trainer)


def go_on(
    rank: int,
    world: int,
    layout: str,
    folder: Path,
    *,
    steps: int,
    save_at: int = -1,
    save_to: Path | None = None,
    source: Path | None = None,
    seed: int = 7,
    workers: int = 0,
    dropout: float = 0.0,
    layers: int = SIZES["num_layers"],
    kind: type[GPTModule] = GPTModule,
    **options: Any,
) -> Run:
    """Train until `steps`, from a checkpoint or from the start, and save on the way."""
    pl.seed_everything(seed, verbose=False)
    witness = Witness(save_at, save_to)
    replicas = LAYOUTS.get(layout, {}).get("data_parallel_size", 1)
    limits = {"trainer": {"max_steps": steps, "limit_val_batches": 0}}
    trainer = make_trainer(layout, world, [witness], **limits, **options)
    overrides = {**SIZES, "dropout": dropout, "num_layers": layers}
    module = kind(overrides=overrides, max_steps=100, warmup_steps=5)
    data = make_data(folder, replicas, workers)
    trainer.fit(module, datamodule=data, ckpt_path=source)
    return {
        "loaded": witness.loaded,
        "saved": witness.saved,
        "losses": witness.losses,
        "batches": witness.batches,
        "end": whole_state(trainer),
        "shapes": {n: tuple(local_shape(p)) for n, p in own_parameters(module).items()},
    }


def local_shape(tensor: Any) -> Any:
    """Shape of what this rank holds."""
    return tensor.to_local().shape if hasattr(tensor, "to_local") else tensor.shape


def run_layout(layout: str, folder: Path, **options: Any) -> list[Run]:
    """Run `go_on` on all ranks of a layout."""
    found: list[Run] = run_ranks(go_on, world_of(layout), layout, folder, timeout=150, **options)
    return found


def differences(got: Any, wanted: Any, where: str = "") -> list[str]:
    """Names of what differs in any bit between two nests of tensors and values."""
    if isinstance(wanted, torch.Tensor):
        same = isinstance(got, torch.Tensor) and got.dtype == wanted.dtype
        return [] if same and torch.equal(got, wanted) else [where]
    if isinstance(wanted, dict):
        if set(got) != set(wanted):
            return [f"{where}: {list(got)} is not {list(wanted)}"]
        return [d for k in wanted for d in differences(got[k], wanted[k], f"{where}.{k}")]
    if isinstance(wanted, list | tuple):
        if len(got) != len(wanted):
            return [f"{where}: {len(got)} is not {len(wanted)}"]
        pairs = enumerate(zip(got, wanted, strict=True))
        return [d for i, (g, w) in pairs for d in differences(g, w, f"{where}[{i}]")]
    return [] if got == wanted else [f"{where}: {got!r} is not {wanted!r}"]
