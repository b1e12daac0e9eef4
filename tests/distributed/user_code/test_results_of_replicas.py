"""What hooks read of a step's result on several replicas: that of the global batch."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Reading(PlainModule):
    """Keeps what its hooks get; labels of its samples count in unequal numbers."""

    def __init__(self, *, is_sum: bool = False) -> None:
        super().__init__()
        self.got, self.kind = list[float](), "sum" if is_sum else "mean"

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch[0]).flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten(), reduction=self.kind)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "tokens": int((batch[1] >= 0).sum()), "size": len(batch[0])}

    def on_before_backward(self, loss: Tensor) -> None:
        self.got.append(float(loss))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got += [float(outputs[name]) for name in ("loss", "tokens", "size")]
        self.log("of_hook", outputs["loss"], sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.got.append(float(outputs))


class Keeping(Callback):
    """Keeps the losses, as a callback that plots them does."""

    def __init__(self) -> None:
        self.got = list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.got.append(float(outputs["loss"]))


def _samples(count: int) -> list[tuple[Tensor, Tensor]]:
    samples = [(tokens, labels.clone()) for tokens, labels in token_pairs(count)]
    for index, (_, labels) in enumerate(samples):
        labels[: index * 5 % 11] = -100
    return samples


def _train(
    rank: int, world: int, layout: str | None, count: int, accumulated: int, is_sum: bool
) -> Any:
    seed_everything(0, verbose=False)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    callback, module = Keeping(), Reading(is_sum=is_sum).double()
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        callbacks=[callback],
        accumulate_grad_batches=accumulated,
    )
    replicas = 1 if layout is None else 2
    samples = _samples(count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader, other = (DataLoader(s, 8 // replicas) for s in (samples, samples[::-1]))
        trainer.fit(module, loader, other)
    weight = module.net.head.weight if layout == "zero1" or layout is None else torch.zeros(())
    said = [str(w.message) for w in caught if "hooks get" in str(w.message)]
    logged = float(trainer.logged_metrics["of_hook"])
    return module.got, callback.got, logged, float(weight.detach().sum()), said


@pytest.mark.parametrize(
    ("layout", "count", "accumulated", "is_sum"),
    [
        ("zero1", 32, 1, False),
        ("zero1", 29, 1, True),
        ("zero3", 29, 2, False),
        ("zero2_offload", 32, 1, False),
        ("zero1pp2", 32, 1, False),
    ],
)
def test_hooks_get_the_loss_of_the_global_batch(
    layout: str, count: int, accumulated: int, is_sum: bool
) -> None:
    ((found, kept, logged, weight, _),) = run_ranks(_train, 1, None, count, accumulated, is_sum)
    ranks = 4 if layout == "zero1pp2" else 2
    results = run_ranks(_train, ranks, layout, count, accumulated, is_sum, timeout=180)
    for got, got_kept, got_logged, got_weight, said in results:
        assert got == pytest.approx(found, rel=1e-6)
        assert got_kept == pytest.approx(kept, rel=1e-6)
        assert got_logged == pytest.approx(logged, rel=1e-6)
        if layout == "zero1":
            assert got_weight == pytest.approx(weight, rel=1e-6)
        assert not said


class Own(Reading):
    """Returns what no rule joins."""

    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss, "rows": batch[0], "other": batch[1], "power": loss.detach().exp()}

    def on_before_backward(self, loss: Tensor) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got += [float(outputs["loss"]), float(outputs["power"]), float(outputs["rows"].sum())]


def _warned(rank: int, world: int, is_manual: bool) -> list[str]:
    seed_everything(0, verbose=False)
    strategy: Any = Hybrid3DStrategy(**LAYOUTS["zero1"])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Own(is_manual=is_manual).double(), DataLoader(_samples(16), 4))
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("is_manual", [False, True])
def test_what_is_of_one_replica_is_named(is_manual: bool) -> None:
    told, others = run_ranks(_warned, 2, is_manual, timeout=180)
    (own,) = [text for text in told if "samples of this replica" in text]
    assert "training_step()['rows']" in own
    assert "'other'" not in own
    assert ("'loss'" in own) == ("'power'" in own) == is_manual
    assert any("['power']. It is not known whether" in text for text in told) == (not is_manual)
    assert not [text for text in others if "samples of this replica" in text]
