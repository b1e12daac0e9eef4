"""torchmetrics that hooks update, and those that no module holds: each sample counts once."""

from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassStatScores

from lightning_par import Hybrid3DStrategy
from tests.support.models.plain_language_model import AttendingNet, PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Outside(Callback):
    """Has metrics of its own, which hooks update; the step updates some that are in a dict."""

    def __init__(self) -> None:
        self.sum, self.mean, self.found = SumMetric(), MeanMetric(), []
        self.of_step = {"sum": SumMetric(), "mean": MeanMetric()}

    def on_validation_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, *_: Any):
        self.sum.update(batch[1])
        self.mean.update(out.mean(), len(out))

    def on_validation_epoch_end(self, *_: Any) -> None:
        for metric in (self.sum, self.mean, *self.of_step.values()):
            self.found += [float(metric.compute()), float(metric.compute())]
        self.sum.reset()  # the others go on


class Updating(PlainModule):
    def __init__(self, metrics: dict[str, Metric], net: Any) -> None:
        super().__init__(net)
        self.metrics = metrics

    def parallel_plan(self) -> Any:
        plan = super().parallel_plan()
        return replace(plan, tensor={}) if isinstance(self.net, AttendingNet) else plan

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.metrics["sum"].update(batch[1])
        self.metrics["mean"].update(logits.mean((1, 2)))
        return logits.mean((1, 2))


def _measure_outside(
    rank: int, world: int, layout: str | None, attends: bool, count: int
) -> list[float]:
    seed_everything(0, verbose=False)
    outside = Outside()
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=2, callbacks=[outside]
    )
    samples = token_pairs()[:24]
    batch_size = 4 if layout == "zero1" else 8
    loaders = [DataLoader(part, batch_size) for part in (samples, samples[:count])]
    net = AttendingNet() if attends else None
    trainer.fit(Updating(outside.of_step, net).double(), *loaders)
    return outside.found


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero1"])
def test_metrics_that_no_module_holds_count_each_sample_once(layout: str) -> None:
    (found,) = run_ranks(_measure_outside, 1, None, False, 16)
    assert len(found) == 24  # the sanity check, and two epochs
    for got in run_ranks(_measure_outside, 2, layout, False, 16, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize(("layout", "count"), [("cp2", 16), ("zero1", 17)])
def test_metrics_in_a_dict_count_divided_and_repeated_samples_once(layout: str, count: int) -> None:
    attends = layout == "cp2"
    (found,) = run_ranks(_measure_outside, 1, None, attends, count)
    wanted = [value for start in (4, 12, 20) for value in found[start : start + 4]]
    for every in run_ranks(_measure_outside, 2, layout, attends, count, timeout=180):
        got = [value for start in (4, 12, 20) for value in every[start : start + 4]]
        assert got == pytest.approx(wanted, rel=1e-6)


class InHooks(Callback):
    """Updates its metrics, and one of the module, in hooks that get a batch."""

    def __init__(self) -> None:
        self.samples, self.pairs = [SumMetric()], MulticlassStatScores(64)
        self.group = MetricCollection([MulticlassF1Score(64), MulticlassAccuracy(64)])
        self.found = list[float]()

    def on_train_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples[0].update(batch[1])
        self.found.append(float(self.samples[0].compute()))

    def on_validation_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Any, *_: Any
    ) -> None:
        guesses = batch[1] // 2 * 2  # some are right, whatever the weights are
        module.of_hook(guesses[:, 0])
        self.pairs(guesses, batch[1])
        self.group.update(guesses, batch[1])

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        for metric in (module.of_hook, self.pairs):
            self.found += [float(metric.compute().square().sum()) for _ in range(2)]
        self.found += map(float, self.group.compute().values())
        self.pairs.reset()  # the others go on


class WithMetric(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.of_hook = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def _measure_in_hooks(rank: int, world: int, layout: str | None) -> list[float]:
    seed_everything(0, verbose=False)
    hooks = InHooks()
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=2, callbacks=[hooks]
    )
    batch_size = 4 if layout == "zero1" else 8
    loaders = [DataLoader(token_pairs()[:17], batch_size) for _ in range(2)]
    trainer.fit(WithMetric().double(), *loaders)
    return hooks.found


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero1"])
def test_metrics_that_hooks_update_count_each_sample_once(layout: str) -> None:
    (found,) = run_ranks(_measure_in_hooks, 1, None)
    assert len(found) == 3 * 6 + 2 * 3
    for got in run_ranks(_measure_in_hooks, 2, layout, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)
