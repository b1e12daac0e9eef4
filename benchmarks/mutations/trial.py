"""Trains a small model with a fault, and says what the run was told."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.mutations import bits, data, stages, tensor  # noqa: F401  (they fill FAULTS)
from benchmarks.mutations.fault import FAULTS, PROVED, Switch
from benchmarks.mutations.healthy import HEALTHY
from lightning_par import Hybrid3DStrategy
from lightning_par.errors import LightningParError
from lightning_par.models import GPTModule, MixtralModule
from tests.support.ranks.api import run_ranks

__all__ = ["LISTS", "Found", "run", "run_healthy"]

LISTS = {"faults": FAULTS, "healthy": HEALTHY}

_STEPS = 44
_SIZES = {"vocab_size": 64, "num_layers": 4, "model_dim": 32, "num_heads": 4, "ff_dim": 64}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a run.

    Attributes:
        text: Of the error that ended it, with its code; empty: none did.
        step: Optimizer steps before it.
        changed: Largest relative difference of a weight from a run without the fault; None: it was
            not looked for, as the run was ended.
    """

    text: str
    step: int
    changed: float | None = None

    @property
    def verdict(self) -> str:
        """What the run was told: "software", "machine", "crash" or "missed"."""
        if not self.text:
            return "missed"
        code = re.match(r"LP\d+", self.text)
        if code is None:
            return "crash"
        return "machine" if code[0] in ("LP805", "LP807") else "software"

    @property
    def ranks(self) -> set[int]:
        """Ranks that the error names as those at fault."""
        named = re.search(r"\branks? ([\d, ]+?) (?:holds?\b|\(host)", self.text)
        return {int(n) for n in named[1].split(",")} if named else set()


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 16 tokens, of which some have fewer labels that count."""
    torch.manual_seed(1)
    rows = torch.randint(64, (count, 17))
    labels = rows[:, 1:].clone()
    for number in range(len(labels)):
        labels[number, : number % 8] = -100
    return [
        {"input_ids": row[:-1], "labels": label} for row, label in zip(rows, labels, strict=True)
    ]


class _Wide(GPTModule):
    """Adam divides by no number that is 0 in 16 bits."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


def _train(
    rank: int,
    world: int,
    listed: str,
    number: int,
    faulty: bool,
    verify: str | bool,
    steps: int = _STEPS,
) -> tuple[str, int, dict[str, torch.Tensor]]:
    warnings.filterwarnings("ignore")
    chosen = LISTS[listed][number]
    torch.manual_seed(0)
    switch = Switch(chosen.when, chosen.rank)
    if faulty:
        chosen.install(switch)
    overrides = {**_SIZES, **chosen.overrides}
    options: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 0, "max_steps": 10_000}
    kind: Any = _Wide if "precision" in chosen.trainer else GPTModule
    if chosen.experts:
        kind, overrides = MixtralModule, {**overrides, "num_experts": 4, "num_kv_heads": 2}
    batch = 8 if world == 2 and "zero_stage" not in chosen.layout else 4
    samples: Any = _samples(8 * chosen.accumulate * steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(**chosen.layout, verify=verify),
        max_steps=steps,
        accumulate_grad_batches=chosen.accumulate,
        callbacks=[switch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen.trainer,
    )
    module = kind(overrides=overrides, **options)
    try:
        trainer.fit(module, DataLoader(samples, batch))
    except LightningParError as error:
        return f"{error.code} {error}", trainer.global_step, {}
    proof = trainer.strategy.start.proof  # type: ignore[attr-defined]
    if not faulty and verify and rank == 0:
        return "", trainer.global_step, {"proved": torch.tensor(_proved(proof.outcomes))}
    return "", trainer.global_step, {n: p.detach() for n, p in module.named_parameters()}


def _proved(outcomes: Mapping[str, str]) -> int:
    """Return how many steps were equal; 0 if any was not proved."""
    return 0 if any("not proved" in each for each in outcomes.values()) else len(outcomes)


def run_healthy(number: int, *, steps: int, every: int) -> str:
    """Train without a fault; return what came of it."""
    chosen = LISTS["healthy"][number]
    arguments = chosen.world, "healthy", number, False, f"every {every}", steps
    try:
        text, _, found = run_ranks(_train, *arguments, timeout=900, fresh=True)[0]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return f"FALSE ALARM: {text}" if text else f"{int(found['proved'])} steps proved"


def run(number: int, *, every: int = PROVED) -> Found:
    """Train with a fault, and, if nothing was told, look whether it changed anything."""
    chosen = FAULTS[number]
    try:
        told = run_ranks(
            _train, chosen.world, "faults", number, True, f"every {every}", timeout=240, fresh=True
        )
    except Exception as error:  # the fault may end the run in any way
        return Found(text=f"{type(error).__name__}: {str(error)[-300:]}", step=-1)
    text, step, weights = next((t for t in told if t[0]), told[0])
    if text:
        return Found(text=text, step=step)
    _, _, healthy = run_ranks(
        _train, chosen.world, "faults", number, False, False, timeout=240, fresh=True
    )[0]
    differences = [
        float((weights[n] - healthy[n]).norm() / healthy[n].norm().clamp_min(1e-12))
        for n in healthy
    ]
    return Found(text="", step=step, changed=max(differences))
