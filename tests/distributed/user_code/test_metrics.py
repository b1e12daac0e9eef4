"""torchmetrics of the user's module: what they log of a batch that is cut, and what cannot be."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_par import Hybrid3DStrategy
from tests.distributed.user_code.test_batches import Undeclared
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Measured(PlainModule):
    """Logs metrics of steps and of epochs, none of which is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(64, average="macro")
        both = [MulticlassF1Score(64, average="weighted"), MulticlassAccuracy(64, average="macro")]
        self.train_metrics = MetricCollection(both, prefix="train/")
        self.val_f1 = MulticlassF1Score(64, average="macro")
        self.guesses, self.mean, self.all = SumMetric(), MeanMetric(), CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        logits = self.net(tokens).flatten(0, 1)
        self.f1(logits, labels.flatten())
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.train_metrics(logits, labels.flatten())
        self.log_dict(self.train_metrics)
        self.guesses.update(logits.argmax(-1).double())
        loss = F.cross_entropy(logits, labels.flatten())
        self.log("loss", loss, sync_dist=True)
        self.mean(loss)
        self.log("mean", self.mean)
        self.all(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("guesses", self.guesses.compute())
        self.log("all", self.all.compute().mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        self.val_f1(self.net(tokens).flatten(0, 1), labels.flatten())
        self.log("val_f1", self.val_f1, on_step=True, on_epoch=True)


class Weighing(PlainModule):
    """Gives metrics a mean, once with the number that it is over, and once without."""

    def __init__(self, *, weighs: bool) -> None:
        super().__init__()
        self.weighs = weighs
        self.mean_loss, self.val_loss = MeanMetric(), MeanMetric()

    def _update(self, metric: MeanMetric, batch: Any) -> Tensor:
        loss = self.loss(batch)
        metric.update(loss, (batch[1] != -100).sum() if self.weighs else 1.0)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._update(self.mean_loss, batch)

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", self.mean_loss.compute())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._update(self.val_loss, batch)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.val_loss.compute())


class Sized(PlainModule):
    """Logs a mean over labels with the number of samples, as `self.log` asks for where it cannot
    tell it from the batch.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]), sync_dist=True)
        self.log("loss_of_epoch", loss, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)
        self.log("spread", self.net(batch[0]).std((1, 2)).mean(), sync_dist=True)


class _Steps(Callback):
    """Writes down what each training step has logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        names = ("f1_step", "mean", "train/MulticlassF1Score", "train/MulticlassAccuracy")
        found = trainer.logged_metrics
        self.logged.append({name: float(found[name]) for name in names if name in found})


class Changing(PlainModule):
    """Logs a weight, and a tensor that the step then changes in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "bias": self.net.head.bias[0]}, sync_dist=True)
        loss += 0.1 * loss.detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        loss += 1


def _ragged() -> list[tuple[Tensor, Tensor]]:
    """Samples with unequal numbers of labels."""
    return [
        (x, y.masked_fill(torch.arange(len(y)) > index % 7, -100))
        for index, (x, y) in enumerate(token_pairs())
    ]


def _train(rank: int, world: int, layout: str | None, made: Any) -> Any:
    seed_everything(0, verbose=False)
    module, samples = made()
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    steps = _Steps()
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=2, callbacks=[steps]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas = 2 if layout in ("zero1", "zero3") else 1
        loaders = [
            DataLoader(part, 8 // replicas, sampler=_share(part, replicas, rank))
            for part in (samples, samples[:16])
        ]
        trainer.fit(module, *loaders)
    told = [str(w.message) for w in caught if "updates the metrics" in str(w.message)]
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    left = [m for m in metrics if m._forward_hooks or m._forward_pre_hooks]
    return steps.logged, found, told, bool(left)


def _share(samples: Any, replicas: int, rank: int) -> Any:
    return DistributedSampler(samples, replicas, rank if replicas > 1 else 0, shuffle=False)


def _measured() -> Any:
    return Measured().double(), token_pairs()


def _weighed() -> Any:
    return Weighing(weighs=True).double(), _ragged()


def _unweighed() -> Any:
    return Weighing(weighs=False).double(), _ragged()


class Grouped(PlainModule):
    """Updates a collection, which updates the first metric of those with the same state."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {
            "f1": MulticlassF1Score(64, average="macro"),
            "accuracy": MulticlassAccuracy(64),
            "without_0": MulticlassAccuracy(64, ignore_index=0),
        }
        self.group = MetricCollection(kinds, prefix="val/")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch[1].flatten()
        self.net(batch[0])
        self.group.update(labels // 2 * 2, labels)  # some are right, whatever the weights are
        assert [*self.group.compute_groups.values()] == [["accuracy", "f1"], ["without_0"]]
        self.log_dict(self.group, on_step=False, on_epoch=True)


def _validate(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(0, verbose=False)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", proves=True)
    # No label of the first micro-batch, nor of the first batch of a replica, is 0.
    samples = [(x, y * (n > 6) + (n < 7)) for n, (x, y) in enumerate(token_pairs()[:16])]
    loader = DataLoader(samples, 4 if layout == "zero1" else 8)
    return trainer.validate(Grouped().double(), loader, verbose=False)[0]


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_metrics_of_a_compute_group_are_proved(layout: str) -> None:
    (found,) = run_ranks(_validate, 1, None)
    for got in run_ranks(_validate, 2, layout, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


class Meaning(PlainModule):
    """Gives the loss of a batch to a mean that counts batches, and counts them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.val_mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mean(self.loss(batch))
        self.log("val_mean", self.val_mean, on_step=False, on_epoch=True)


def _meaning() -> Any:
    return Meaning().double(), token_pairs()[:12]  # the last batch has one micro-batch of two


def _sized() -> Any:
    return Sized().double(), _ragged()[:30]  # the last batch is not full


class Masking(Undeclared):
    """Its training loss leaves out tokens that its validation counts."""

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        losses = F.cross_entropy(self.net(tokens).transpose(1, 2), labels, reduction="none")
        mask = (labels % 3 != 0).to(losses)
        return (losses * mask).sum() / mask.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0]).transpose(1, 2)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)


def _masking() -> Any:
    """The halves of the first batch, in the order of the samples, have as many masked labels."""
    counts = [8, 4, 4, 8, 4, 8, 8, 4, *range(1, 9)]
    masked = [torch.arange(12) >= count for count in counts]
    pairs = zip(token_pairs(), masked, strict=False)
    return Masking().double(), [(a, b % 60 // 3 * 3 + (~mask).long()) for (a, b), mask in pairs]


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_a_mean_over_tokens_that_the_training_loss_leaves_out(layout: str) -> None:
    ((_, found, *_),) = run_ranks(_train, 1, None, _masking)
    for _, got, *_ in run_ranks(_train, 2, layout, _masking, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("layout", ["pp2", "pp2_interleaved"])
def test_a_mean_that_counts_updates_counts_batches(layout: str) -> None:
    ((_, found, *_),) = run_ranks(_train, 1, None, _meaning)
    for _, got, *_ in run_ranks(_train, 2, layout, _meaning, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("layout", ["zero1", "pp2"])
def test_a_batch_size_weighs_nothing_inside_of_a_batch(layout: str) -> None:
    ((_, found, *_),) = run_ranks(_train, 1, None, _sized)
    for _, got, *_ in run_ranks(_train, 2, layout, _sized, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


def _changing() -> Any:
    return Changing().double(), token_pairs()


@pytest.mark.parametrize("layout", ["pp2", "zero1", "zero3", "tp2"])
def test_what_is_logged_is_the_value_at_the_call(layout: str) -> None:
    ((steps, found, *_),) = run_ranks(_train, 1, None, _changing)
    for got_steps, got, *_ in run_ranks(_train, 2, layout, _changing, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)
        assert got_steps == [pytest.approx(step, rel=1e-6) for step in steps]


def _evaluate(rank: int, world: int, layout: str | None) -> Any:
    """Evaluate without a fit before, which would have shown how the loss weighs."""
    seed_everything(0, verbose=False)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(_ragged()[:30], 8 if layout is None else 4)
        found = trainer.test(Sized().double(), loader, verbose=False)[0]
    return found, [str(w.message) for w in caught if "test_step logs" in str(w.message)]


def test_an_evaluation_alone_weighs_labels() -> None:
    ((found, _),) = run_ranks(_evaluate, 1, None)
    for got, told in run_ranks(_evaluate, 2, "zero1", timeout=180):
        assert got == pytest.approx(found, rel=1e-6)
        assert not told


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_a_step_logs_the_metric_of_the_whole_batch(layout: str) -> None:
    ((steps, found, _, _),) = run_ranks(_train, 1, None, _measured)
    assert [len(step) for step in steps] == [4] * 8
    results = run_ranks(_train, 2, layout, _measured, timeout=180)
    for got_steps, got, told, left in results:
        assert got == pytest.approx(found, rel=1e-6)
        for one, other in zip(got_steps, steps, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
        assert not left
        # The entries of self.all are the losses of micro-batches, and self.mean counts them; one
        # rank says so.
        named = {text.split(" once ")[0] for text in told}
        is_told = layout == "pp2" and told is results[0][2]
        text = "training_step updates the metrics self.all, self.mean"
        assert named == ({text} if is_told else set())


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_a_metric_that_depends_on_how_a_batch_is_cut_is_named(layout: str) -> None:
    ((_, found, *_),) = run_ranks(_train, 1, None, _weighed)
    for _, got, told, _ in run_ranks(_train, 2, layout, _weighed, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)
        assert not told
    ((_, found, *_),) = run_ranks(_train, 1, None, _unweighed)
    results = run_ranks(_train, 2, layout, _unweighed, timeout=180)
    for _, got, *_ in results:
        assert got["mean_loss"] != pytest.approx(found["mean_loss"], rel=1e-6)
        if layout == "pp2":  # evaluates whole batches for it
            assert got["val_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
    told = results[0][2]
    assert any("training_step updates the metrics self.mean_loss" in text for text in told)
    assert (layout == "zero1") == any("validation_step" in text for text in told)


class Manual(PlainModule):
    """Optimizes by itself, and calls a metric in its step."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(64, average="macro")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        logits = self.net(tokens).flatten(0, 1)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(logits, labels.flatten()))
        optimizer.step()
        self.f1(logits, labels.flatten())
        self.log("f1", self.f1, on_step=False, on_epoch=True)


def _manual() -> Any:
    return Manual().double(), token_pairs()


@pytest.mark.parametrize("layout", ["tp2", "zero1", "zero3"])
def test_a_manual_step_calls_a_metric(layout: str) -> None:
    ((_, found, *_),) = run_ranks(_train, 1, None, _manual)
    assert "f1" in found
    for _, got, *_ in run_ranks(_train, 2, layout, _manual, timeout=180):
        assert got == pytest.approx(found, rel=1e-6)


class Late(PlainModule):
    """Logs numbers that are 0 until the weights have moved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, moves = super().training_step(batch, batch_idx), float(self.global_step > 1)
        self.log("samples", moves * len(batch[0]), sync_dist=True)
        self.log("square", moves * loss.detach() ** 2, sync_dist=True)
        return loss


def _log_late(rank: int, world: int, layout: str) -> Any:
    seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Late().double(), DataLoader(token_pairs(), 4))
    told = [str(w.message) for w in caught if "training_step logs" in str(w.message)]
    return float(trainer.callback_metrics["samples"]), told


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_numbers_that_are_0_at_first_are_looked_at_again(layout: str) -> None:
    results = run_ranks(_log_late, 2, layout, timeout=180)
    for samples, _ in results:
        assert samples == (4 if layout == "pp2" else 8)  # of the global batch
    assert [text.startswith("training_step logs square.") for text in results[0][1]] == [True]
