"""The law of every strategy, for any LightningModule: the same loss, gradients and weights as one
process.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import lightning_par
from tests.support.parity import quiet_trainer, Recorder, TOLERANCE
from tests.support.ranks.api import run_ranks

Made = tuple[pl.LightningModule, Dataset[Any]]
Result = dict[str, Any]


class _GlobalRecorder(Recorder):
    """Takes the loss over all replicas."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note_late(trainer, pl_module)
        self.losses.append(float(trainer.callback_metrics["global_loss"]))


def train_model(
    make: Callable[..., Made],
    options: Mapping[str, Any],
    strategy: Any,
    *,
    devices: int,
    batch_size: int,
    trainer: Mapping[str, Any] | None = None,
) -> Result:
    """Train one epoch in float64 and say what came out.

    Args:
        make: Gives the module, built, and its training samples; it logs ``global_loss``.
        options: Of `make`.
        strategy: Of the Trainer.
        devices: Of the Trainer.
        batch_size: Of a replica.
        trainer: Other options of the Trainer.
    """
    torch.set_default_dtype(torch.float64)
    recorder = _GlobalRecorder()
    torch.manual_seed(5)
    module, samples = make(**options)
    made = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        precision="64-true",
        max_epochs=1,
        **(trainer or {}),
    )
    training = DataLoader(samples, batch_size=batch_size)
    held_out = Subset(samples, range(len(samples) - 8, len(samples)))  # type: ignore[arg-type]
    made.fit(module, training, DataLoader(held_out, batch_size=batch_size))
    state = getattr(made.strategy, "gather_state_dict", module.state_dict)()
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {k: v.detach().clone() for k, v in state.items()},
        "shapes": recorder.shapes,
        "logged": {k: float(v) for k, v in made.callback_metrics.items()},
    }


def train_model_rank(
    rank: int, world: int, make: Any, options: Any, strategy: dict[str, Any], run: dict[str, Any]
) -> Result:
    """Run `train_model` on one rank of a mesh."""
    kind = lightning_par.Hybrid3DStrategy
    return train_model(make, options, kind(**strategy), devices=world, **run)


@cache
def _one_process(make: Any, options: str, run: str) -> Result:
    try:
        return train_model(make, eval(options), "auto", devices=1, **eval(run))
    finally:
        torch.set_default_dtype(torch.float32)


def assert_model_parity(
    make: Callable[..., Made],
    options: Mapping[str, Any],
    strategy: Mapping[str, Any],
    *,
    batch_size: int,
    micro_batches: int = 1,
    trainer: Mapping[str, Any] | None = None,
    gradients: bool = True,
) -> list[Result]:
    """Assert that every rank computes what one process does.

    Args:
        make: Gives the module, built, and its training samples.
        options: Of `make`.
        strategy: Of `Hybrid3DStrategy`; every size is given.
        batch_size: Of all replicas together.
        micro_batches: Into how many the reference cuts a batch, by accumulation: for losses that
            are no mean over samples.
        trainer: Other options of the Trainer.
        gradients: Whether to compare them, too: they are gone where the optimizer is on the host.
    """
    sizes = [v for k, v in strategy.items() if k.endswith("parallel_size")]
    world = 1
    for name, size in strategy.items():
        if name.endswith("parallel_size") and not name.startswith("expert"):
            world *= size
    assert len(sizes) >= 3
    other = {"accumulate_grad_batches": micro_batches} if micro_batches > 1 else {}
    whole = {"batch_size": batch_size // micro_batches, "trainer": {**(trainer or {}), **other}}
    wanted = _one_process(make, repr(dict(options)), repr(whole))
    part = {"batch_size": batch_size // strategy["data_parallel_size"], "trainer": trainer or {}}
    ranks: list[Result] = run_ranks(
        train_model_rank, world, make, dict(options), dict(strategy), part, timeout=120
    )
    _compare(ranks, wanted, micro_batches, gradients)
    return ranks


def _mean_of(values: Sequence[float], size: int) -> list[float]:
    return [sum(values[i : i + size]) / size for i in range(0, len(values), size)]


def _compare(ranks: Sequence[Result], wanted: Result, micro_batches: int, gradients: bool) -> None:
    close = {"rtol": 0, "atol": TOLERANCE}
    losses = _mean_of(wanted["losses"], micro_batches)
    assert len(wanted["gradients"]) >= 3
    seen = set()
    for rank, result in enumerate(ranks):
        torch.testing.assert_close(result["losses"], losses, **close)
        if gradients:
            seen |= _compare_gradients(result, wanted, rank)
        validated = {k: v for k, v in result["logged"].items() if k.startswith("val_")}
        assert validated
        torch.testing.assert_close(validated, {k: wanted["logged"][k] for k in validated}, **close)
    assert not gradients or set(wanted["gradients"][0]) <= seen
    weights = ranks[0]["weights"]
    assert list(weights) == list(wanted["weights"])
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, wanted["weights"][name], **close, msg=lambda m, n=name: f"{n}: {m}"
        )


def _compare_gradients(result: Result, wanted: Result, rank: int) -> set[str]:
    """Return the names of what was compared."""
    close = {"rtol": 0, "atol": TOLERANCE}
    pairs = zip(result["gradients"], wanted["gradients"], strict=True)
    for step, (got, want) in enumerate(pairs):
        for name, grad in got.items():
            assert grad is not None, f"{name} has no gradient on rank {rank}"
            known = name if name in want else "model.embed.weight"
            note = f"gradient of {name} on rank {rank} in step {step}"
            torch.testing.assert_close(
                grad, want[known], **close, msg=lambda m, n=note: f"{n}: {m}"
            )
    return {name for step in result["gradients"] for name in step}
