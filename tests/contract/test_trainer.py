"""What one device does under the Trainer, every layout does: same numbers, files and epochs."""

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

from tests.contract.subject import data, Diary, files, LAYOUTS, numbers, SEED, TalkativeModule
from tests.support.exhaustive import some
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

Run = dict[str, Any]
Scenario = Callable[..., Run]
Options = Callable[[], Run]
pytestmark = pytest.mark.contract
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def start(
    scenario: str, strategy: Callable[[], Any], folder: Path, devices: int, replicas: int, **o: Any
) -> Run:
    """Run a scenario of this file in float64."""
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(SEED, verbose=False)

    def options() -> Run:
        return {"strategy": strategy(), "devices": devices, "precision": "64-true"}

    found: Run = globals()[scenario](options, folder, replicas, **o)
    return found


def start_rank(
    rank: int, world: int, scenario: str, layout: str, replicas: int, folder: Path, o: Run
) -> Run:
    """Run a scenario on one rank of a layout; "one" is one device without a strategy of ours."""
    import lightning_par

    def strategy() -> Any:
        if layout == "one":
            return "auto"
        return lightning_par.Hybrid3DStrategy(**LAYOUTS[layout])

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


def monitored(trainer: Options, folder: Path, replicas: int) -> Run:
    diary, rates = Diary(), LearningRateMonitor()
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
    best = ModelCheckpoint(
        folder / "best", "{epoch}-{step}", "val_loss", save_top_k=2, save_last=True
    )
    logger = CSVLogger(folder / "log", flush_logs_every_n_steps=1)
    made = quiet_trainer(
        **trainer(),
        max_epochs=8,
        log_every_n_steps=1,
        enable_checkpointing=True,
        logger=logger,
        callbacks=[diary, rates, stopping, best, Timer(duration="00:01:00:00")],
    )
    module = TalkativeModule("plateau", "adamw", blocks=2)
    made.fit(module, data(10, 4, replicas), data(8, 4, replicas))
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


@pytest.mark.parametrize("layout", some(LAYOUTS, {"tp2"}))
def test_monitored_fit_is_that_of_one_device(layout: str, tmp_path: Path) -> None:
    wanted, results = both(monitored, layout, tmp_path)
    assert 1 < wanted["epoch"] < 8
    assert len(set(wanted["rates"])) > 1
    firsts = [out.pop("first") for out in wanted["outputs"]]
    found = [[out.pop("first") for out in r["outputs"]] for r in results]
    for result in results:
        result["files"].remove("log/lightning_logs/version_0/certificate.json")  # only a mesh's run
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


# ---------------------------------------------------------------- checkpoints and resuming


def resumed(
    trainer: Options,
    folder: Path,
    replicas: int,
    *,
    epochs: int,
    ckpt: Path | None = None,
) -> Run:
    """Fit until `epochs`, from a checkpoint or from the start."""
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    diary = Diary()
    made = quiet_trainer(
        **trainer(),
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[saver, diary],
    )
    module = TalkativeModule("step", "adamw", blocks=2)
    made.fit(module, data(10, 4, replicas), data(8, 4, replicas), ckpt_path=ckpt)
    made.strategy.barrier()
    state = getattr(made.strategy, "gather_state_dict", module.state_dict)()
    return {
        "step": made.global_step,
        "rates": diary.rates,
        "val_loss": float(made.callback_metrics["val_loss"]),
        "weights": dict(state),
    }


def moments(path: Path) -> dict[int, Run]:
    """States of the optimizer in a checkpoint."""
    (optimizer,) = torch.load(path, weights_only=False)["optimizer_states"]
    return dict(optimizer["state"])


@pytest.mark.parametrize("layout", some(LAYOUTS, {"tp2"}))
def test_resuming_equals_the_uninterrupted_run_on_every_layout(layout: str, tmp_path: Path) -> None:
    """From its own checkpoint, from that of a plain Trainer, and a plain Trainer from its."""
    plain, meshed = tmp_path / "plain", tmp_path / layout
    wanted = in_one_process(resumed, layout, plain, epochs=4)
    (whole,) = [r for r in on_ranks(resumed, layout, meshed, epochs=4) if r["weights"]]
    assert_same(whole, wanted)
    last = {"rates": wanted["rates"][6:], "step": wanted["step"], "val_loss": wanted["val_loss"]}
    for source in (plain, meshed):
        first = on_ranks(resumed, layout, tmp_path / "next", epochs=4, ckpt=source / "epoch=1.ckpt")
        assert_same(first[0], {**last, "weights": wanted["weights"]})
        assert_same(first[1], {**last, "weights": {}})
    back = in_one_process(
        resumed, layout, tmp_path / "back", epochs=4, ckpt=meshed / "epoch=1.ckpt"
    )
    assert_same(back, {**last, "weights": wanted["weights"]})
    assert_same(moments(meshed / "epoch=3.ckpt"), moments(plain / "epoch=3.ckpt"))
    loaded = TalkativeModule.load_from_checkpoint(meshed / "epoch=3.ckpt", weights_only=False)
    assert_same(dict(loaded.state_dict()), {n: w.float() for n, w in wanted["weights"].items()})


# ---------------------------------------------------------------- validate, test and predict


class KeepPredictions(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        self.batches.append((prediction, list(batch_indices)))

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.epoch = predictions


def all_loops(trainer: Options, folder: Path, replicas: int) -> Run:
    writer = KeepPredictions()
    made = quiet_trainer(**trainer(), max_epochs=1, callbacks=[writer])
    module = TalkativeModule(blocks=2)
    train, held = data(10, 4, replicas), data(8, 4, replicas)
    before = made.validate(module, held, verbose=False)
    fresh = made.predict(module, held)
    made.fit(module, train, held)
    first = numbers(made.callback_metrics)
    tested = made.test(module, held, verbose=False)
    made.fit_loop.max_epochs = 3
    made.fit(module, train, held)
    found = {
        "validated": before,
        "first": first,
        "tested": tested,
        "second": numbers(made.callback_metrics),
        "step": made.global_step,
        "after": made.validate(module, held, verbose=False),
    }
    writer.batches.clear()
    last = made.predict(module, held)
    return {**found, "fresh": fresh, "last": last, "written": writer.batches, "epoch": writer.epoch}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loop_in_any_order_is_that_of_one_device(layout: str, tmp_path: Path) -> None:
    wanted, results = both(all_loops, layout, tmp_path)
    predicted = ("fresh", "last", "written", "epoch")
    for result in results:
        for name in wanted.keys() - set(predicted):
            assert_same(result[name], wanted[name], f"{layout}.{name}")
    if layout != "dp2":
        for rank, result in enumerate(results):
            told = predicted if rank == 0 else ("fresh", "last")  # one rank of a replica writes
            assert_same({n: result[n] for n in told}, {n: wanted[n] for n in told})
        return
    for name in ("fresh", "last"):
        for result in results:
            assert_same(torch.cat(result[name]), torch.cat(wanted[name]), name)
    seen = [i for result in results for _, indices in result["written"] for i in indices]
    assert sorted(seen) == list(range(8))


def alone(trainer: Options, folder: Path, replicas: int, *, loop: str) -> Run:
    made = quiet_trainer(**trainer())
    run = getattr(made, loop)
    found = run(TalkativeModule(blocks=2), data(6, 3, replicas))
    return {"found": found}


@pytest.mark.parametrize("loop", ["predict", "test"])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_loop_without_a_fit_is_that_of_one_device(layout: str, loop: str, tmp_path: Path) -> None:
    wanted, results = both(alone, layout, tmp_path, loop=loop)
    assert_same(results, [wanted, wanted])


# ---------------------------------------------------------------- limits


LIMITS: dict[str, Run] = {
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2},
    "fractions": {"limit_train_batches": 0.4, "limit_val_batches": 0.5, "max_epochs": 2},
    "validation inside the epoch": {"val_check_interval": 2, "max_epochs": 2},
    "validation at half of it, without inference mode": {
        "val_check_interval": 0.5,
        "inference_mode": False,
        "max_epochs": 1,
    },
    "overfitting": {"overfit_batches": 1, "max_epochs": 3},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "no sanity check": {"num_sanity_val_steps": 0, "max_epochs": 1},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 2},
    "no validation": {"limit_val_batches": 0, "max_epochs": 1},
    "fast run": {"fast_dev_run": 2},
    "anomalies": {"detect_anomaly": True, "max_epochs": 1},
}


def limited(trainer: Options, folder: Path, replicas: int) -> Run:
    found = {}
    for name, options in LIMITS.items():
        diary = Diary()
        made = quiet_trainer(**trainer(), **options, callbacks=[diary])
        module = TalkativeModule(blocks=2)
        made.fit(module, data(18, 4, replicas), data(8, 4, replicas))
        metrics = numbers(made.callback_metrics)
        found[name] = {"step": made.global_step, "calls": diary.calls, "metrics": metrics}
    return found


@pytest.mark.parametrize("layout", some(LAYOUTS, {"tp2"}))  # the loops of which are as alone
def test_limits_are_those_of_one_device(layout: str, tmp_path: Path) -> None:
    wanted, results = both(limited, layout, tmp_path)
    for result in results:
        assert_same(result, wanted, layout)
