"""Averages of weights, kept in parts, equal those of one process, also over a change of layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, TensorDataset

import lightning_par
from lightning_par.errors import ConfigurationError
from tests.support.exhaustive import some
from tests.support.models.mixture import layout as sizes
from tests.support.models.mixture import make
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import own_parameters, quiet_trainer, TOLERANCE
from tests.support.ranks.api import run_ranks

Run = dict[str, Any]
CLOSE = {"rtol": 0, "atol": TOLERANCE}


def host(zero: int = 1, dp: int = 1, tp: int = 1, pp: int = 1, **offload: Any) -> Run:
    return sizes(tp=tp, pp=pp, dp=dp, zero=zero, offload_options=offload)


LAYOUTS = {
    "pp2": sizes(pp=2),
    "cp2": sizes(context_parallel_size=2),
    "dp2 zero0": sizes(dp=2, zero=0),
    "dp2 zero1": sizes(dp=2),
    "dp2 zero3": sizes(dp=2, zero=3),
    "tp2": sizes(tp=2),
    "tp2 pp2": sizes(tp=2, pp=2),
    "host alone": host(),
    "host alone, delayed": host(delayed_update=0),
    "host tp2, delayed": host(tp=2, delayed_update=1),
    "host pp2, a half": host(pp=2, offload_fraction=0.5),
    "host dp2 zero2, sums": host(dp=2, zero=2, accumulate_on="host"),
    "host dp2 zero3, parameters": host(dp=2, zero=3, offload_parameters=True),
    "experts ep2": sizes(dp=2, ep=2),
    "experts ep2 dp2 zero3": sizes(dp=4, ep=2, zero=3),
    "experts ep2 tp2": sizes(tp=2, dp=2, ep=2),
    "experts ep2, host": sizes(dp=2, ep=2, zero=2, offload_options={}),
}
WHOLE = ("cp2", "dp2 zero0", "host alone", "host alone, delayed")
"""Those in which a rank holds whole weights, and so whole averages."""


def plain(layout: str) -> str:
    """Name of the run on one process that has the model of a layout."""
    kind = layout.split()[0]
    return f"{kind} plain" if kind in ("host", "experts") else "toy plain"


def pull(average: Tensor, current: Tensor, count: Any) -> Tensor:
    """An average of whole weights that a user wrote."""
    return average + (current - average) / (1 + current.norm())


def pull_all(averages: Any, currents: Any, count: Any) -> None:
    """An average of lists, entry by entry."""
    for average, current in zip(averages, currents, strict=True):
        average.lerp_(current.to(average.dtype), 0.4)


class EveryEpoch(WeightAveraging):
    """Averages once an epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


AVERAGES: dict[str, Callable[[], Callback]] = {
    "moving": lambda: EMAWeightAveraging(decay=0.7, update_starting_at_step=1),
    "every epoch": lambda: EveryEpoch(multi_avg_fn=pull_all, use_buffers=False),
    "stochastic": lambda: StochasticWeightAveraging(0.3, 2, annealing_epochs=2, avg_fn=pull),
}


class Buffered(ToyModule):
    """Two buffers that every step changes, of which one is not saved."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer=optimizer, blocks=2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += self.seen.new_tensor([1.0, 0.5])
        self.count += 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)]


def task(layout: str) -> tuple[pl.LightningModule, Dataset[Any], Dataset[Any]]:
    """A module, what it is trained with, and what it is validated with."""
    if layout.startswith("experts"):
        module, samples = make(adam=True, balance="bias")
        return module, samples, samples
    return Buffered("adamw" if "host" in layout else "sgd"), ToyData(10), ToyData(4)


class Witness(Callback):
    """Keeps losses, rates and what is held; saves after the second epoch."""

    def __init__(self, save_to: Path) -> None:
        self.save_to = save_to
        self.losses: list[float] = []
        self.shapes: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = trainer.callback_metrics
        self.losses += [float(metrics.get("global_loss", metrics["train_loss"])), rate]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.save_to)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics.get("val_loss", 0)))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if average is not None:
                self.shapes = [_held(p) for p in average.parameters()]
                # A hook finds a tied parameter under the first of its names, as one process does.
                held = [_held(p) for p in own_parameters(module).values()]
                assert sorted(self.shapes) == sorted(held)


def _held(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape)


def train(rank: int, world: int, layout: str, folder: Path, source: Path | None = None) -> Run:
    """Train with each average, from a checkpoint or from the start; then validate."""
    torch.set_default_dtype(torch.float64)
    options, found = LAYOUTS.get(layout, {}), {}
    replicas = options.get("data_parallel_size", 1)
    for name, make_average in AVERAGES.items():
        torch.manual_seed(5)
        module, samples, held = task(layout)
        witness = Witness(folder / name)
        strategy: Any = "auto"
        if options:
            strategy = lightning_par.Hybrid3DStrategy(verify=False, **options)
        trainer = quiet_trainer(
            strategy=strategy,
            devices=world,
            max_epochs=3,
            precision="64-true",
            callbacks=[make_average(), witness],
        )
        data, held_out = loader(samples, 4 // replicas), loader(held, 4 // replicas)
        trainer.fit(module, data, held_out, ckpt_path=None if source is None else source / name)
        weights = {k: v.clone() for k, v in module.state_dict().items()}
        (score,) = trainer.validate(module, held_out, verbose=False)
        own = {"losses": witness.losses, "weights": weights, "score": score["val_loss"]}
        found[name] = {**own, "shapes": witness.shapes}
    return found


class Runs:
    """Each layout's run, from the start or from another one's checkpoints, made once.

    Args:
        folder: Where each leaves its checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[tuple[str, str | None], list[Run]] = {}

    def get(self, layout: str, source: str | None = None) -> list[Run]:
        """What each rank has seen."""
        if (layout, source) not in self._found:
            if source is not None:
                self.get(source)
            options = LAYOUTS.get(layout, {})
            axes = ("tensor", "pipeline", "data", "context")
            world = torch.Size(options.get(f"{axis}_parallel_size", 1) for axis in axes).numel()
            place = self.folder / (layout if source is None else f"{layout} from {source}")
            place.mkdir()
            start = None if source is None else self.folder / source
            found = run_ranks(train, world, layout, place, start, timeout=180)
            self._found[layout, source] = list(found)
        return self._found[layout, source]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("averages"))


def assert_equal(results: list[Run], wanted: Run) -> None:
    for rank, result in enumerate(results):
        for name, got in result.items():
            for key in ("losses", "score", "weights"):
                note = lambda m, n=name, k=key, r=rank: f"{n}: {k} on rank {r}: {m}"  # noqa: E731
                torch.testing.assert_close(got[key], wanted[name][key], **CLOSE, msg=note)


def averages_in(path: Path) -> Run:
    """What Lightning keeps of averages in a checkpoint."""
    found = torch.load(path, weights_only=False, map_location="cpu")
    keys = ("state_dict", "current_model_state", "averaging_state")
    own = {key: dict(found[key]) for key in keys if key in found}
    for state in found["callbacks"].values():
        own |= {k: dict(v) if isinstance(v, dict) else v for k, v in state.items()}
    own.pop("scheduler_state", None)
    return own


# What fails on one axis alone fails on both; ZeRO 1 holds the parts that ZeRO 3 holds.
ALONE = {
    "pp2",
    "tp2",
    "dp2 zero0",
    "dp2 zero1",
    "host alone",
    "host tp2, delayed",
    "host pp2, a half",
    "host dp2 zero2, sums",
    "experts ep2 dp2 zero3",
    "experts ep2 tp2",
    "experts ep2, host",
}


@pytest.mark.parametrize("layout", some(LAYOUTS, ALONE))
def test_averages_and_their_checkpoints_equal_one_process(layout: str, runs: Runs) -> None:
    results, (wanted,) = runs.get(layout), runs.get(plain(layout))
    assert_equal(results, wanted)
    for name in AVERAGES:
        is_whole = results[0][name]["shapes"] == wanted[name]["shapes"]
        assert is_whole == (layout in WHOLE)
        saved, alone = (averages_in(runs.folder / at / name) for at in (layout, plain(layout)))
        assert list(saved) == list(alone)
        torch.testing.assert_close(saved, alone, **CLOSE)


GO_ON = [
    ("tp2 pp2", "toy plain"),
    ("toy plain", "tp2 pp2"),
    ("dp2 zero3", "tp2 pp2"),
    ("host alone, delayed", "host dp2 zero3, parameters"),
    ("host dp2 zero3, parameters", "host plain"),
    ("host plain", "host pp2, a half"),
    ("experts plain", "experts ep2 dp2 zero3"),
    ("experts ep2 dp2 zero3", "experts plain"),
    ("experts ep2, host", "experts ep2 tp2"),
]


@pytest.mark.parametrize("pair", some(GO_ON, GO_ON[5:]), ids=" from ".join)
def test_averages_go_on_in_another_layout(pair: tuple[str, str], runs: Runs) -> None:
    # A callback does not save when an epoch has updated it, so that one process does not go on
    # as if it had not stopped.
    layout, source = pair
    start = plain(layout)
    (wanted,) = runs.get(start, start)
    assert_equal(runs.get(layout, source), wanted)


class Normalized(pl.LightningModule):
    """Its statistics are taken anew, after the last epoch, with the average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        norms = nn.BatchNorm1d(5), nn.BatchNorm1d(7, momentum=0.3)
        self.net = nn.Sequential(norms[0], nn.Linear(5, 7), nn.Tanh(), norms[1], nn.Linear(7, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def normalize(rank: int, world: int, options: Run | None) -> Run:
    torch.set_default_dtype(torch.float64)
    strategy: Any = "auto" if options is None else lightning_par.Hybrid3DStrategy(**options)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=world,
        max_epochs=3,
        precision="64-true",
        sync_batchnorm=options is not None,
        callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)],
    )
    module = Normalized()
    samples = TensorDataset(torch.randn(12, 5, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, loader(samples, 4 // world))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_statistics_are_taken_anew_with_the_average() -> None:
    (wanted,) = run_ranks(normalize, 1, None)
    for result in run_ranks(normalize, 2, sizes(dp=2, zero=3), timeout=180):
        torch.testing.assert_close(result, wanted, **CLOSE)


class SwaOfBatchNorm(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def pull_longest(averages: Any, currents: Any, count: Any) -> None:
    longest = max(current.norm() for current in currents)
    for average, current in zip(averages, currents, strict=True):
        average.lerp_(current, 1 / (1 + longest))


REFUSED: dict[str, tuple[Callable[[], Callback], type[ToyModule], str]] = {
    "an average of whole weights": (
        lambda: WeightAveraging(multi_avg_fn=pull_longest),
        ToyModule,
        r"WeightAveraging\(multi_avg_fn.* on pp 2 a rank has .* each entry separately, or avg_fn=",
    ),
    "a second pass for BatchNorm": (
        lambda: StochasticWeightAveraging(0.1),
        SwaOfBatchNorm,
        r"StochasticWeightAveraging .* BatchNorm .* pipeline_parallel_size=2.*EMAWeightAveraging",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_parts_cannot_average_is_refused_before_anything_starts(case: str) -> None:
    callback, module, says = REFUSED[case]
    strategy = lightning_par.Hybrid3DStrategy(**LAYOUTS["pp2"])
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[callback()])
    with pytest.raises(ConfigurationError, match=says):
        trainer.fit(module(), loader(ToyData(4), 2))


def validate_again(rank: int, world: int, layout: str, how: str) -> Any:
    """Train on a mesh, then validate with the callback on one device, with a new one, or in the
    same Trainer.

    Returns:
        The score; or the text of the refusal.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    module, callback = ToyModule(), EMAWeightAveraging(decay=0.7)

    def trainer(devices: int, callback: Callback) -> pl.Trainer:
        strategy: Any = "auto"
        if devices > 1:
            strategy = lightning_par.Hybrid3DStrategy(verify=False, **LAYOUTS[layout])
        given = {"devices": devices, "max_epochs": 1, "precision": "64-true"}
        return quiet_trainer(strategy=strategy, callbacks=[callback], **given)

    used = trainer(world, callback)
    held_out = loader(ToyData(4), 4)
    used.fit(module, loader(ToyData(8), 4), held_out)
    if how != "the same Trainer":
        used = trainer(1, callback if how == "the same callback" else EMAWeightAveraging(decay=0.7))
    try:
        (score,) = used.validate(module, held_out, verbose=False)
    except ConfigurationError as error:
        return str(error)
    return score["val_loss"]


def test_average_of_an_earlier_run_is_refused_with_cures_that_work() -> None:
    (wanted,) = run_ranks(validate_again, 1, "toy plain", "the same callback")
    for told in run_ranks(validate_again, 2, "pp2", "the same callback", timeout=120):
        assert "Use a new callback, or use the Trainer of that run again" in told
        assert "LP611" in told
    for how in ("a new callback", "the same Trainer"):
        for score in run_ranks(validate_again, 2, "pp2", how, timeout=120):
            assert score == pytest.approx(wanted, abs=TOLERANCE)
