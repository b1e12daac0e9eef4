"""What a step leaves in attributes under a pipeline: that of the batch, not of a micro-batch."""

import re
import warnings
from collections import Counter, defaultdict, deque, OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import nn, Tensor
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_par import Hybrid3DStrategy
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Meter:
    """An average meter, as many projects have it."""

    def __init__(self) -> None:
        self.last = self.sum = self.mean = 0.0
        self.count = 0

    def update(self, value: float, count: int) -> None:
        """Add a value."""
        self.last, self.sum, self.count = value, self.sum + value * count, self.count + count
        self.mean = self.sum / self.count


class Smoothed(Meter):
    """An average meter with a window, as many projects have it."""

    def __init__(self) -> None:
        super().__init__()
        self.window = deque[float](maxlen=2)

    def update(self, value: float, count: int) -> None:
        """Add a value."""
        super().update(value, count)
        self.window.append(value)


class Result(NamedTuple):
    """What a step gives to a callback."""

    loss: Tensor
    tokens: Tensor


class Counting(nn.Module):
    """A loss that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.calls = 0.0, 0

    def forward(self, loss: Tensor) -> Tensor:
        """Count the loss."""
        self.total, self.calls = self.total + float(loss.detach()), self.calls + 1
        return loss


class Keeping(PlainModule):
    """Keeps numbers of each kind in each place that users keep them in."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.steps, self.average, self.tokens = 0.0, 0, 0.0, 7
        self.added, self.new, self.moved = torch.zeros(()), torch.zeros(()), torch.ones(3)
        self.array, self.counts, self.sums = (
            np.zeros(2),
            Counter[str](),
            defaultdict[str, float](float),
        )
        self.of_samples, self.of_steps, self.pair = Meter(), Meter(), [0.0, 0]
        self.held = self.added  # another name for the same tensor
        self._private, self.seen = 0.0, 0
        self.mean: float | None = None
        self.histogram, self.rows, self.place = torch.zeros(64), torch.zeros(64, 12), 0
        self.row_counts, self.started, self.other = np.zeros(64), False, 0.0
        self.history: list[dict[str, float]] = []
        self.newest: Any = {}
        self.stats: dict[str, float] = {"seen": 0, "loss": 0.0, "average": 0.0}
        self.outputs, self.result, self.lazy = None, Result(torch.zeros(()), torch.zeros(())), None
        self.meter, self.rows_of, self.nested = Meter(), list[int](), {"of": {"loss": 0.0}}
        self.criterion, self.space, self.texts = Counting(), SimpleNamespace(seen=0), ["a", "b"]
        self.meters, self.current = {"train": Meter()}, Meter()
        self.grid_of, self.known, self.by_key = torch.Size(), set[str](), dict[str, int]()
        self.correct: Any = 0
        self.in_list, self.leaf = [torch.zeros(())], torch.zeros((), requires_grad=True)
        self.first, self.random = torch.zeros(3), 12345678901234567
        self.window, self.tensors, self.pairs = (deque[Any](maxlen=n) for n in (2, 20, 2))
        self.tokens_of, self.ordered = deque[int](maxlen=10), OrderedDict[str, deque[float]]()
        self.smoothed = defaultdict[str, Smoothed](Smoothed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep them."""
        self.steps += 1
        self.seen += len(batch[0])
        self.tokens = batch[1].numel()
        loss = super().training_step(batch, batch_idx)
        value = float(loss.detach())
        self.total += value
        self.average = 0.9 * self.average + 0.1 * value
        self.added += loss.detach()
        self.new = self.new + loss.detach()
        self.moved.mul_(0.5).add_(loss.detach())
        self.array += value
        self.counts["steps"] += 1
        self.counts.update(map(str, batch[1].flatten().tolist()))
        self.sums["loss"] += value
        self.of_samples.update(value, len(batch[0]))
        self.of_steps.update(value, 1)
        self.pair[0] += value
        self.pair[1] += 1
        self._private += value
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        self.histogram += torch.bincount(batch[1].flatten(), minlength=64)[:64]
        self.row_counts += np.bincount(batch[1].flatten().numpy(), minlength=64)[:64]
        self.rows[self.place : self.place + len(batch[0])] = batch[0].float()
        self.place += len(batch[0])
        self.other = 0.5 * self.other + value if self.started else value
        self.started = True
        self.in_list[0] += loss.detach()
        with torch.no_grad():
            self.leaf += 1
        self.newest = {"labels": int(batch[1].sum()), "batch": batch}
        self.history.append(self.newest)
        self.random = (self.random * 6364136223846793005 + 1) % 2**63
        self.loss_of_step, self.inputs = loss, batch[0]
        self._replace(batch, value, loss)
        self._move(batch, value, loss)
        return loss

    def _move(self, batch: Any, value: float, loss: Tensor) -> None:
        """Keep what came last."""
        self.window.append(value)
        self.tensors.append(loss.detach())
        self.pairs.append({"loss": value, "of": (len(batch[0]), batch[0])})
        self.tokens_of.extend(batch[0][:, 0].tolist())
        self.ordered.setdefault("loss", deque(maxlen=3)).append(value)
        self.ordered.setdefault("last", deque(maxlen=2)).append(value)
        self.smoothed["loss"].update(value, len(batch[0]))
        self.log("window", sum(self.window) / len(self.window))

    def _replace(self, batch: Any, value: float, loss: Tensor) -> None:
        """Put new containers and objects in the place of those of the last step."""
        size, before = len(batch[0]), self.stats
        average = 0.5 * before["average"] + value
        self.stats = {"seen": before["seen"] + size, "loss": value, "average": average}
        self.outputs = {"loss": loss.detach(), "batch": batch, "of": [value, size]}
        self.result = Result(loss, batch[1])
        self.meter, self.rows_of = Meter(), batch[0][:, 0].tolist()
        self.meter.update(value, size)
        self.nested = {"of": {"loss": value}}
        # What is made once, where another value tells that it is there.
        if self.grid_of != batch[0].shape[1:]:
            self.grid_of, self.grid = batch[0].shape[1:], torch.arange(batch[0].shape[1]).double()
        if "all" not in self.known:
            self.known.add("all")
            self.by_key["all"] = 0
        self.by_key["all"] += size
        self.correct += (batch[0][:, 0] == 12).sum()  # none in the first batch
        self.criterion(loss)
        self.space.seen += size
        self.encoding = BatchEncoding({"ids": batch[0]})
        self.texts.clear()
        self.texts.extend(map(str, batch[0][:, 0].tolist()))
        self.squeezed = batch[1][:, 0].squeeze().tolist()
        self.top = batch[0].max(1)
        self.current = self.meters["train"]
        self.current.update(value, size)
        self.of_model = CausalLMOutput(loss=loss, logits=batch[1][..., None].double())
        if self.lazy is None:
            self.lazy = {"seen": 0, "steps": 0}
        self.lazy["seen"] += size
        self.lazy["steps"] += 1

    def state(self) -> dict[str, Any]:
        """Return all that is kept, with numbers as floats."""
        names = (
            "total",
            "steps",
            "mean",
            "other",
            "place",
            "seen",
            "average",
            "tokens",
            "added",
            "new",
            "held",
            "_private",
        )
        return {
            **{name: float(getattr(self, name)) for name in names},
            **{name: {**vars(getattr(self, name))} for name in ("of_samples", "of_steps")},
            "moved": self.moved.tolist(),
            "first": self.first.tolist(),
            "in_list": float(self.in_list[0]),
            "leaf": float(self.leaf.detach()),
            "random": str(self.random),
            "histogram": self.histogram.tolist(),
            "row_counts": self.row_counts.tolist(),
            "rows": self.rows.tolist(),
            "labels": sum(each["labels"] for each in self.history),
            "array": self.array.tolist(),
            "counts": dict(self.counts),
            "sums": dict(self.sums),
            "pair": list(self.pair),
            "loss": float(self.loss_of_step.detach()),
            "inputs": self.inputs.tolist(),
            "stats": self.stats,
            "outputs": [float(self.outputs["loss"]), *self.outputs["of"]],
            "batch": [entry.tolist() for entry in self.outputs["batch"]],
            "result": [float(self.result.loss.detach()), self.result.tokens.tolist()],
            "meter": {**vars(self.meter)},
            "rows_of": self.rows_of,
            "nested": self.nested["of"],
            "cached": [self.grid.tolist(), self.by_key["all"], len(self.known), int(self.correct)],
            "criterion": [self.criterion.total, self.criterion.calls],
            "space": [self.space.seen, {**vars(self.current)}],
            "encoding": self.encoding["ids"].tolist(),
            "texts": [self.texts, self.squeezed, self.top.values.tolist()],
            "of_model": [float(self.of_model.loss.detach()), self.of_model.logits.tolist()],
            "lazy": self.lazy,
            **self._moved(),
        }

    def _moved(self) -> dict[str, Any]:
        """Return what came last."""
        return {
            "window": [*self.window, float(self.trainer.callback_metrics["window"])],
            "tensors": [float(each) for each in self.tensors],
            "pairs": [[each["loss"], each["of"][0], each["of"][1].tolist()] for each in self.pairs],
            "tokens_of": [*self.tokens_of],
            "ordered": [[*each] for each in self.ordered.values()],
            "smoothed": {**vars(self.smoothed["loss"]), "window": [*self.smoothed["loss"].window]},
        }


def _kept(rank: int, world: int, layout: str | None, schedule: str = "1f1b") -> list[Any]:
    torch.set_default_dtype(torch.float32)  # other tests of the process may have left another one
    seed_everything(0, verbose=False)
    module, found = Keeping().double(), list[Any]()
    strategy: Any = "auto"
    if layout is not None:
        options = {"schedule": schedule, **LAYOUTS[layout]}
        strategy = Hybrid3DStrategy(**options, verify=False)

    def on_train_batch_end(*_: Any) -> None:
        found.append(module.state())

    module.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=3)
    trainer.fit(module, DataLoader(token_pairs(), 8))
    return found


def _flat(value: Any) -> Any:
    """Give nested values in an order in which pytest compares numbers approximately."""
    if isinstance(value, dict):
        return [item for key in sorted(value) for item in (key, *_flat(value[key]))]
    if isinstance(value, list):
        return [item for entry in value for item in _flat(entry)]
    return [value]


@pytest.mark.parametrize(("layout", "schedule"), [("pp2", "1f1b"), ("pp2", "zbv"), ("tp2", "1f1b")])
def test_what_is_kept_is_that_of_the_batch_on_every_rank(layout: str, schedule: str) -> None:
    wanted = _flat(_kept(0, 1, None))
    torch.set_default_dtype(torch.float32)
    for found in run_ranks(_kept, 2, layout, schedule, timeout=180):
        for one, other in zip(_flat(found), wanted, strict=True):
            assert one == (other if isinstance(other, str) else pytest.approx(other, rel=1e-6))


HISTORY, SUMS, METER = list[float](), defaultdict[str, list[float]](list), Meter()
COUNT = 0


def _note(value: float) -> None:
    global COUNT
    COUNT += 1
    HISTORY.append(value)


def _counter() -> Callable[[int], int]:
    seen = 0

    def count(size: int) -> int:
        nonlocal seen
        seen += size
        return seen

    return count


ROWS, TWICE = _counter(), _counter()


def _counting() -> tuple[type[PlainModule], list[float]]:
    seen, last = list[float](), 0.0

    class Outside(PlainModule):
        """Keeps values on its class, in globals and in variables of the function around it."""

        outputs: ClassVar[list[float]] = []
        table: ClassVar[dict[str, float]] = {}
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            """Keep them."""
            nonlocal last
            loss = super().training_step(batch, batch_idx)
            value = float(loss.detach())
            self.outputs.append(value)
            self.table["loss"] = self.table.get("loss", 0.0) + value
            type(self).steps += 1
            _note(value)
            ROWS(len(batch[0]))
            TWICE(2 * len(batch[0]))
            SUMS["loss"].append(value)
            METER.update(value, len(batch[0]))
            seen.append(value)
            last = 0.5 * last + value
            return loss

        def on_train_end(self) -> None:
            """Return what is kept; lists have an entry of each micro-batch."""
            lists = [sum(each) / len(each) for each in (self.outputs, HISTORY, SUMS["loss"], seen)]
            numbers = [*self.table.values(), *vars(METER).values(), last]
            found[:] = [*lists, *numbers, self.steps, COUNT, ROWS(0), TWICE(0)]

    found = list[float]()
    return Outside, found


def _kept_outside(rank: int, world: int, layout: str | None) -> list[float]:
    global COUNT
    ROWS(-ROWS(0)), TWICE(-TWICE(0))
    HISTORY.clear(), SUMS.clear(), METER.__init__()  # type: ignore[misc]
    COUNT = 0
    torch.set_default_dtype(torch.float32)
    seed_everything(0, verbose=False)
    kind, found = _counting()
    strategy = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout], verify=False)
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=3)
    trainer.fit(kind().double(), DataLoader(token_pairs(), 8))
    torch.set_default_dtype(torch.float32)
    return found


def test_what_is_kept_outside_of_the_module_is_that_of_the_batch_on_every_rank() -> None:
    wanted = _kept_outside(0, 1, None)
    for found in run_ranks(_kept_outside, 2, "pp2", timeout=180):
        assert found == pytest.approx(wanted, rel=1e-6)


class Best(PlainModule):
    """Keeps the smallest loss, which no mean of the losses of micro-batches gives."""

    best = 1e9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep it."""
        loss = super().training_step(batch, batch_idx)
        self.best = min(self.best, float(loss.detach()))
        return loss


class Slotted:
    """An object that has no attributes of its own."""

    __slots__ = ("value",)


class Later(PlainModule):
    """Keeps from the second step on what the look at the first one has not seen."""

    phase, auxiliary = 0, 0.0
    kept: Slotted | None = None

    def __init__(self) -> None:
        super().__init__()
        self.by_batch: dict[int, float] = {}
        self.window = deque[float](maxlen=20)
        self.is_small, self.parts = False, dict[str, float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep them; the phase is no number of a micro-batch."""
        loss = super().training_step(batch, batch_idx)
        self.by_batch[batch_idx] = float(loss.detach())
        if batch_idx:
            self.window.append(float(loss.detach()))
            self.phase, self.auxiliary = batch_idx, 2 * float(loss.detach())
        # All alike in the first batch, by a number that says nothing.
        self.is_small = batch_idx == 0 or bool((batch[0][:, 0] < 32).all())
        self.parts = {"all": float(loss.detach())}
        if batch_idx and int(batch[0][0, 0]) % 2:
            self.parts["odd"] = 1.0
        self.kept = Slotted()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Read what other stages do not get."""
        assert self.kept is None or isinstance(self.kept, Slotted)


def _told(rank: int, world: int, kind: type[PlainModule]) -> list[str]:
    seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(**LAYOUTS["pp2"], verify=False)
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind().double(), DataLoader(token_pairs(), 8))
    return [str(warning.message) for warning in caught]


def test_a_minimum_of_losses_is_named() -> None:
    told = " ".join(run_ranks(_told, 2, Best, timeout=180)[0])
    assert re.search(r"self\.best in a later step\. It is not known whether", told)


def test_values_that_no_look_has_seen_are_named_once() -> None:
    told = " ".join(run_ranks(_told, 2, Later, timeout=180)[0])
    for name in ("auxiliary", "by_batch", "is_small", "parts", "window"):
        assert len(re.findall(rf"self\.{name}", told)) == 1
    assert len(re.findall(r"values in self\.kept that cannot be sent", told)) == 1
    assert "self.phase" not in told


class Reading(Callback):
    """Reads what a step has left in it."""

    def __init__(self) -> None:
        self.last, self.total, self.history = 0.0, {"loss": 0.0}, list[tuple[float, ...]]()

    def put(self, loss: float) -> None:
        self.last = loss
        self.total["loss"] += loss

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.history.append((self.last, self.total["loss"], trainer.datamodule.seen))


class Samples(LightningDataModule):
    seen = 0.0

    def train_dataloader(self) -> Any:
        return DataLoader(token_pairs(), 8)


class Telling(PlainModule):
    """Finds a callback and the data module in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        next(c for c in self.trainer.callbacks if isinstance(c, Reading)).put(float(loss.detach()))
        self.trainer.datamodule.seen += float(loss.detach())
        return loss


def _tell(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(0, verbose=False)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    reading = Reading()
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        callbacks=[reading],
        proves=True,
    )
    trainer.fit(Telling().double(), datamodule=Samples())
    return reading.history


@pytest.mark.parametrize("layout", ["pp2", "pp2_one_microbatch", "tp2"])
def test_callbacks_and_data_modules_get_numbers_of_the_batch(layout: str) -> None:
    (wanted,) = run_ranks(_tell, 1, None)
    assert len(wanted) == 8
    for found in run_ranks(_tell, 2, layout, timeout=180):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
