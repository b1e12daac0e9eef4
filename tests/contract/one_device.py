"""What a script sees of a run on one device, as plain values, and what a run may leave behind."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_par  # noqa: F401 - registers the strategies
from tests.support.parity import quiet_trainer

__all__ = [
    "NAMES",
    "Diary",
    "Idiom",
    "Run",
    "Stream",
    "Tiny",
    "Vectors",
    "compare",
    "loader",
    "outcome",
    "same_generators",
    "saved",
    "trained",
]

NAMES = ["tensor_parallel", "pipeline_1f1b", "sequence_ring", "zero_offload", "hybrid3d"]
SEED = 11
_UNSAID = ("many workers", "`training_step` returned `None`")
"""Parts of warnings that are not compared: of the number of cores, and one that Lightning gives
once in a process.
"""
OFFLOADED = 1e-5
"""Tolerance with the optimizer on the host, whose Adam rounds in float32 in another order."""
_QUERIES = {"state_dict", "load_state_dict", "configure_sharded_model"}
"""Methods that are no events, or no longer."""


class Vectors(Dataset[Tensor]):
    """The same few vectors, whatever the generator has drawn before."""

    def __init__(self, size: int = 6) -> None:
        self.rows = torch.arange(size * 5.0).sin().view(size, 5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Stream(IterableDataset[Tensor]):
    """The same, of unknown length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Vectors(4).rows)


def loader(size: int = 6, batch_size: int = 2, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Vectors(size), batch_size=batch_size, **options)


class Tiny(pl.LightningModule):
    """Two layers that train in no time; dropout draws random numbers if it is not 0."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.05, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        self.model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Dropout(dropout), nn.Linear(3, 2))
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return ((self.model(batch) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> Any:
        return loader(6, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(3)

    test_dataloader = predict_dataloader = val_dataloader


@dataclass
class Run:
    """What an idiom is given: one strategy, and a folder of its own.

    Attributes:
        strategy: Its registered name, or "auto".
        folder: Where runs write.
    """

    strategy: str
    folder: Path

    def trainer(self, **options: Any) -> pl.Trainer:
        """Return a Trainer on one device of the CPU."""
        given = {"max_epochs": 1, "devices": 1, "default_root_dir": self.folder, **options}
        return quiet_trainer(strategy=self.strategy, **given)

    def fit(self, module: pl.LightningModule | None = None, **options: Any) -> pl.Trainer:
        """Train, and return the Trainer."""
        resumed = {name: options.pop(name) for name in ("ckpt_path",) if name in options}
        trainer = self.trainer(**options)
        trainer.fit(Tiny() if module is None else module, **resumed)
        return trainer


Idiom = Callable[[Run], Any]


def outcome(trainer: pl.Trainer, module: Any) -> list[Any]:
    """Return what a run has computed."""
    counts = trainer.global_step, trainer.current_epoch, str(trainer.state.status)
    return [module, module.losses, dict(trainer.callback_metrics), counts]


def trained(run: Run, module: Any = None, **options: Any) -> list[Any]:
    """Train, and return what that has computed."""
    module = Tiny() if module is None else module
    return outcome(run.fit(module, **options), module)


def saved(path: Any) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    return dict(torch.load(path, weights_only=False))


def same_generators() -> None:
    """Go back to the seed: what resumes one of our checkpoints continues its random numbers."""
    torch.manual_seed(SEED)


def _noting(name: str, owner: type, notes: list[str]) -> Callable[..., Any]:
    given = getattr(owner, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes.append(f"{owner.__name__}.{name}")
        return given(self, *args, **kwargs)

    return hook


def _events(owner: type, *kinds: type) -> list[str]:
    found = {n for kind in kinds for n, _ in getmembers(kind, isfunction) if n[0] != "_"}
    return sorted(found - _QUERIES)


@dataclass
class Diary:
    """Notes every hook that the Trainer calls, of a callback and of a module.

    Attributes:
        notes: ``"<class>.<hook>"``, in order.
    """

    notes: list[str] = field(default_factory=list)

    def callback(self) -> Callback:
        """Return a callback that notes its hooks."""
        hooks = {n: _noting(n, Callback, self.notes) for n in _events(Callback, Callback)}
        return type("Noting", (Callback,), hooks)()

    def module(self, kind: type[Tiny] = Tiny) -> Tiny:
        """Return a module that notes its hooks and steps."""
        names = [*_events(kind, ModelHooks, DataHooks, CheckpointHooks), "training_step"]
        hooks = {n: _noting(n, kind, self.notes) for n in (*names, "configure_optimizers")}
        module: Tiny = type("Noting", (kind,), hooks)()
        return module


def plain(value: Any) -> Any:
    """Return a value made of what ``==`` compares: tensors with dtype and every number."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return [(key, plain(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, nn.Module):
        return plain(value.state_dict())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def observe(idiom: Callable[[Run], Any], strategy: str, folder: Path) -> dict[str, Any]:
    """Run an idiom; return what it gave, its warnings, and where it leaves the generator.

    That of Python is left out: the type checks of test runs draw from it.
    """
    torch.manual_seed(SEED)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = surroundings()
        given = plain(idiom(Run(strategy, folder)))
        after = surroundings()
    left = [f"{k}: {after[k]}" for k in after if before.get(k) != after[k]]
    said = {str(w.message).replace(str(folder), "") for w in seen}
    return {
        "given": given,
        "random": float(torch.rand(())),
        "warnings": sorted(text for text in said if not any(part in text for part in _UNSAID)),
        "left behind": left,
    }


@cache
def _of_plain_trainer(idiom: Idiom) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return observe(idiom, "auto", Path(folder))


def compare(idiom: Idiom, strategy: str, folder: Path) -> None:
    """Assert that an idiom gives under a strategy what it gives under a plain Trainer."""
    wanted, found = _of_plain_trainer(idiom), observe(idiom, strategy, folder)
    tolerance = OFFLOADED if strategy == "zero_offload" else 0.0
    differences = _differences(found, wanted, tolerance)
    assert not differences, "\n".join(differences)


def _differences(found: Any, wanted: Any, tolerance: float, at: str = "") -> list[str]:
    """Return where two values differ, and by what."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        found, wanted = list(found.items()), list(wanted.items())
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return [f"{at}: {found} is no longer or shorter {wanted}"]
        pairs = enumerate(zip(found, wanted, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, tolerance, f"{at}.{i}")]
    numbers = isinstance(found, float) and isinstance(wanted, float)
    if found == wanted or (numbers and abs(found - wanted) <= tolerance * (1 + abs(wanted))):
        return []
    return [f"{at}: {found!r} is not {wanted!r}"]


def surroundings() -> dict[str, Any]:
    """Return what a run may change in its process."""
    return {
        **{f"${name}": value for name, value in os.environ.items()},
        "threads": sorted({t.name for t in threading.enumerate()} - {"tqdm_monitor"}),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "filters": list(warnings.filters),
        "process group": dist.is_available() and dist.is_initialized(),
        "rank": getattr(rank_zero_only, "rank", None),
        "patched": [
            nn.Module.__call__,
            nn.Module.__setattr__,
            torch.optim.Optimizer.__init__,
            LightningOptimizer.step,
            pl.LightningModule.log,
            DataLoader.__init__,
            torch.Tensor.backward,
        ],
        "torch": [
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "log levels": {n: logging.getLogger(n).level for n in ("", "lightning", "lightning_par")},
    }
