"""What one device does under the Trainer, every layout does: same numbers, same files, same epochs."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from tests.contract.subject import data, Diary, files, LAYOUTS, numbers, TalkativeModule
from tests.parity import quiet_trainer
from tests.ranks import run_ranks

Run = dict[str, Any]
Scenario = Callable[..., Run]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def start(scenario: str, strategy: Any, folder: Path, devices: int, replicas: int, **o: Any) -> Run:
    """Run a scenario of this file in float64."""
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(1, verbose=False)
    made = {"strategy": strategy, "devices": devices, "precision": "64-true"}
    found: Run = globals()[scenario](made, folder, replicas, **o)
    return found


def start_rank(
    rank: int, world: int, scenario: str, layout: str, replicas: int, folder: Path, o: Run
) -> Run:
    """Run a scenario on one rank of a layout; "one" is one device without a strategy of ours."""
    import lightning_par

    strategy = "auto" if layout == "one" else lightning_par.Hybrid3DStrategy(**LAYOUTS[layout])
    return start(scenario, strategy, folder, world, replicas, **o)


def in_one_process(scenario: Scenario, layout: str, folder: Path, **options: Any) -> Run:
    """Run a scenario on one device, with the order of samples that the layout's replicas have."""
    replicas = 0 if layout == "dp2" else 1
    (found,) = run_ranks(start_rank, 1, scenario.__name__, "one", replicas, folder, options)
    return dict(found)


def on_ranks(scenario: Scenario, layout: str, folder: Path, **options: Any) -> list[Run]:
    """Run a scenario on all ranks of a layout."""
    replicas = 2 if layout == "dp2" else 1
    found: list[Run] = run_ranks(
        start_rank, 2, scenario.__name__, layout, replicas, folder, options, timeout=120
    )
    return found


def both(scenario: Scenario, layout: str, tmp_path: Path, **options: Any) -> tuple[Run, list[Run]]:
    """Run a scenario on one device and on a layout."""
    wanted = in_one_process(scenario, layout, tmp_path / "one", **options)
    return wanted, on_ranks(scenario, layout, tmp_path / layout, **options)


def assert_same(got: Any, wanted: Any, where: str = "") -> None:
    """Compare nests of numbers, tensors and other values."""
    if isinstance(wanted, Mapping):
        assert sorted(got) == sorted(wanted), where
        for key, value in wanted.items():
            assert_same(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), f"{where}: {got} is not {wanted}"
        for index, value in enumerate(wanted):
            assert_same(got[index], value, f"{where}[{index}]")
    elif isinstance(wanted, float | torch.Tensor):
        note = lambda m: f"{where}: {m}"  # noqa: E731
        torch.testing.assert_close(got, wanted, **EXACT, equal_nan=True, msg=note)
    else:
        assert got == wanted, f"{where}: {got!r} is not {wanted!r}"


def read_csv(folder: Path) -> list[dict[str, float]]:
    """Every row that a CSVLogger wrote, without empty cells."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if v} for row in rows]


# ---------------------------------------------------------------- a fit with callbacks and a logger


def monitored(trainer: Run, folder: Path, replicas: int) -> Run:
    diary, rates = Diary(), LearningRateMonitor()
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
    best = ModelCheckpoint(
        folder / "best", "{epoch}-{step}", "val_loss", save_top_k=2, save_last=True
    )
    logger = CSVLogger(folder / "log", flush_logs_every_n_steps=1)
    made = quiet_trainer(
        **trainer,
        max_epochs=8,
        log_every_n_steps=1,
        enable_checkpointing=True,
        logger=logger,
        callbacks=[diary, rates, stopping, best, Timer(duration="00:01:00:00")],
    )
    module = TalkativeModule("plateau", "adamw")
    made.fit(module, data(10, 4, replicas), data(8, 4, replicas, ordered=True))
    made.strategy.barrier()
    return {
        "epoch": made.current_epoch,
        "step": made.global_step,
        "stopped": stopping.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "best_score": float(best.best_model_score),
        "scores": sorted(float(v) for v in best.best_k_models.values()),
        "files": files(folder),
        "callback_metrics": numbers(made.callback_metrics),
        "logged": numbers(made.logged_metrics),
        "progress": diary.progress,
        "rates": diary.rates,
        "calls": diary.calls,
        "outputs": diary.outputs,
        "rows": read_csv(folder),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_monitored_fit_is_that_of_one_device(layout: str, tmp_path: Path) -> None:
    wanted, results = both(monitored, layout, tmp_path)
    assert 1 < wanted["epoch"] < 8
    assert len(set(wanted["rates"])) > 1
    firsts = [out.pop("first") for out in wanted["outputs"]]
    found = [[out.pop("first") for out in r["outputs"]] for r in results]
    for result in results:
        assert_same(result, without_data_loss(wanted, result, layout), layout)
    if layout == "dp2":
        merged = [torch.stack(pair, 1).flatten() for pair in zip(*found, strict=True)]
        assert_same(merged, firsts)
    else:
        assert_same(found, [firsts, firsts])


def without_data_loss(wanted: Run, result: Run, layout: str) -> Run:
    """What a replica returns from its step is its own part of the loss."""
    if layout != "dp2":
        return wanted
    return {**wanted, "outputs": result["outputs"]}
