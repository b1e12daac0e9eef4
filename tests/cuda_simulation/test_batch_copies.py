"""Batches are pinned and copied on a stream of their own, and where nothing can change them, begun
one step early; every run stays equal, bit for bit, to a plain Trainer's on one device.
"""

import contextlib
import dataclasses
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_par
from lightning_par.engine.offload.copy_stream import BegunCopies, CopyStream
from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.batch_runs import (
    ahead,
    Drawing,
    first,
    Log,
    Losses,
    Net,
    Repeated,
    run,
    same,
    SENT_EARLY,
    STEPS,
    Streaming,
)
from tests.support.cuda_simulation.waits import record_traffic
from tests.support.parity import quiet_trainer

pytestmark = [
    pytest.mark.skipif(not is_wanted(), reason="needs the simulated device"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    yield Log(monkeypatch)
    torch.cuda.synchronize()


# ---- when a copy begins


def test_the_next_batch_is_begun_before_the_step_ends(log: Log) -> None:
    class Steps(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            log.events.append("optimizer")

        def on_train_batch_end(self, *_: Any) -> None:
            log.events.append("end")

    streams: list[int] = []
    plain = CopyStream.send

    def send(stream: Any, source: Tensor) -> Tensor:
        streams.append(stream._stream.stream_id)
        return plain(stream, source)

    CopyStream.send = send  # type: ignore[method-assign]  # the fixture puts it back
    data = ahead(Drawing(12))
    trainer = quiet_trainer(strategy="hybrid3d", devices=1, max_epochs=1, callbacks=[Steps()])
    trainer.fit(Net(), data)
    step = ["begun pinned", "optimizer", "end"]
    assert log.events == ["sent pinned", *step, *step, "optimizer", "end"]
    assert torch.cuda.default_stream().stream_id not in streams
    assert len(set(streams)) == 1


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_host_waits_for_no_copy(log: Log, pinned: bool, workers: int) -> None:
    found = {}
    for strategy in "auto", "hybrid3d":
        waits = Waits()
        options = {"devices": 1, "max_epochs": 1, "callbacks": [waits]}
        data = ahead(Drawing(), pin_memory=pinned, num_workers=workers)
        quiet_trainer(strategy=strategy, **options).fit(Net(), data)
        found[strategy] = sum("copy from the host" in cause for cause, *_ in waits.traffic.waits)
    assert found == {"auto": 0 if pinned else 1, "hybrid3d": 0}
    assert log.count(SENT_EARLY) == (STEPS - 1 if pinned and workers else 0)
    assert log.count("sent pageable") == 0


class Waits(Callback):
    """Records what happens from the end of the second step to that of the third."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.recording = record_traffic()
            self.traffic = self.recording.__enter__()
        elif trainer.global_step == 3:
            self.recording.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (BegunCopies, "wait", "no event orders the two"),
        (CopyStream, "receive", "freed without record_stream"),
    ],
)
def test_a_missing_event_is_caught(
    log: Log, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, message: str
) -> None:
    monkeypatch.setattr(kind, name, lambda *_: None)
    strategy = lightning_par.Hybrid3DStrategy(on_nonfinite="ignore")  # the host waits for nothing
    with pytest.raises(RuntimeError, match=message):
        run(strategy, log, lambda: (Net(), ahead(Drawing())), callbacks=[])
    with contextlib.suppress(RuntimeError):  # the same, found again
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


# ---- every loader


LOADERS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "workers": (lambda: ahead(Drawing()), STEPS - 1),
    "two workers": (lambda: ahead(Drawing(), num_workers=2), None),
    "without order": (lambda: ahead(Drawing(), in_order=False), STEPS - 1),
    "workers, pageable": (lambda: ahead(Drawing(), pin_memory=False), 0),
    "no workers": (lambda: ahead(Drawing(), num_workers=0), 0),
    "no workers, pageable": (lambda: ahead(Drawing(), num_workers=0, pin_memory=False), 0),
    "stream": (lambda: ahead(Streaming(), batch_size=None), STEPS - 1),
    "stream, no workers": (lambda: ahead(Streaming(), num_workers=0, batch_size=None), 0),
    "in place": (lambda: DataLoader(Repeated(), batch_size=None), 0),
    "in place, pinned": (lambda: DataLoader(Repeated(pinned=True), batch_size=None), 0),
    "no loader": (lambda: Repeated(), 0),
    "no loader, pinned": (lambda: Repeated(pinned=True), 0),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_is_equal(log: Log, name: str) -> None:
    make, early = LOADERS[name]
    found = same(log, lambda: (Net(), make())).early
    # Of two workers the second may be there first: then its batch is begun, and the other is not.
    assert found == early if early is not None else 0 < found < STEPS


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders_are_equal(log: Log, mode: str) -> None:
    class Both(Net):
        def values(self, batch: Any) -> Any:
            parts = list(batch.values()) if isinstance(batch, dict) else [batch]
            return [part for part in parts if part is not None]

    def make() -> Any:
        loaders = {"a": ahead(Drawing(12)), "b": ahead(Drawing(20), num_workers=0)}
        return Both(), CombinedLoader(loaders, mode)

    assert 1 < same(log, make).early < STEPS


OPTIONS: dict[str, dict[str, Any]] = {
    "limit": {"limit_train_batches": 3, "max_epochs": 3},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "overfit": {"overfit_batches": 2, "max_epochs": 3},
    "accumulate": {"accumulate_grad_batches": 2, "max_epochs": 2},
    "64-true": {"precision": "64-true"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_trainers_options_are_equal(log: Log, name: str, persistent: bool) -> None:
    options = {"persistent_workers": persistent, "shuffle": name != "overfit"}
    early = same(log, lambda: (Net(), ahead(Drawing(), **options)), **OPTIONS[name]).early
    assert (early == 0) == (name in ("64-true", "bf16-true"))


def test_validation_in_between_is_equal(log: Log) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch.reshape(-1, 3)).square().mean())

        def train_dataloader(self) -> Any:
            return ahead(Drawing())

        def val_dataloader(self) -> Any:
            return DataLoader(Drawing(4), batch_size=2)

    assert same(log, Validated, val_check_interval=2, max_epochs=2).early == 2 * (STEPS - 1)


# ---- every batch


@dataclasses.dataclass
class Sample:
    x: Tensor
    name: str = "a"


class Moving:
    """Moves itself, and keeps one tensor on the host."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.kept = x, x.clone()

    def to(self, device: Any, **_: Any) -> "Moving":
        self.x = self.x.to(device)
        return self

    def pin_memory(self) -> "Moving":
        self.x = self.x.pin_memory()
        return self


class Encoded(UserDict[str, Any]):
    """As tokenizers' BatchEncoding: holds something besides its items."""

    extra = None

    def to(self, device: Any) -> "Encoded":
        self.data = {name: x.to(device) for name, x in self.data.items()}
        return self


def encoded(x: Tensor) -> Encoded:
    made = Encoded(x=x)
    made.extra = "kept"
    return made


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any], int]] = {
    "dataclass": (Sample, lambda b: [b.x, b.x[: len(b.name)]], 0),
    "moves itself": (Moving, lambda b: [b.x, b.kept.cuda()], 0),
    "encoding": (encoded, lambda b: [b["x"][: len(b.extra)]], 0),
    "named tuple": (lambda x: Pair(x, x + 1), lambda b: [b.x, b.y], 2),
    "twice": (lambda x: (x, x), lambda b: [b[0].add_(1), b[1]], 2),
    "nested": (lambda x: {"a": [x, {"b": (x + 1, "text", None, 3)}]}, lambda b: b["a"][:1], 2),
    "view": (lambda x: {"x": x.t()[:, 1:]}, lambda b: [b["x"]], 1),
    "no tensor": (lambda x: {"x": [1.0, 2.0, 3.0]}, lambda b: [torch.tensor(b["x"]).cuda()], 0),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_any_form_are_equal(log: Log, name: str, workers: int) -> None:
    form, values, each = FORMS[name]

    class Formed(Net):
        def values(self, batch: Any) -> Any:
            return values(batch)

    def make() -> Any:
        data = Drawing(STEPS, form)
        return Formed(), ahead(data, num_workers=workers, batch_size=1, collate_fn=first)

    assert same(log, make).early == each * workers * (STEPS - 1)


# ---- every hook


def in_place(batch: Tensor) -> Tensor:
    batch.numpy()[:] *= 2  # torch does not see it
    return batch


class Before(Net):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return in_place(batch)


class Transfer(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        assert batch.device.type == "cpu"
        return in_place(batch).to(device)


class After(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch.device.type == "cuda"
        return batch.mul_(2)


@pytest.mark.parametrize("kind", [Before, Transfer, After])
@pytest.mark.parametrize("of_data", [False, True], ids=["module", "data module"])
@pytest.mark.parametrize("workers", [0, 1])
def test_hooks_are_equal(log: Log, kind: type, of_data: bool, workers: int) -> None:
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

    def make() -> Any:
        data = ahead(Drawing(), num_workers=workers)
        if not of_data:
            return kind(), data
        hooks = {name: vars(kind)[name] for name in names if name in vars(kind)}
        made = type(
            "Data", (pl.LightningDataModule,), {**hooks, "train_dataloader": lambda _: data}
        )
        return Net(), made()

    assert same(log, make).early == (STEPS - 1 if kind is After and workers else 0)


# ---- where it ends


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 3 * 4:
            raise ZeroDivisionError("of the data")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_loader_comes_at_its_step(log: Log, workers: int) -> None:
    for strategy in "auto", "hybrid3d":
        losses, data = Losses(), ahead(Failing(), num_workers=workers, shuffle=False)
        trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=1, callbacks=[losses])
        with pytest.raises(ZeroDivisionError, match="of the data"):
            trainer.fit(Net(), data)
        assert len(losses.found) == 3


@pytest.mark.parametrize("limit", [3, STEPS])
def test_nothing_is_left(log: Log, limit: int) -> None:
    class Fit(Net):
        def on_fit_end(self) -> None:
            self.copies = self.trainer.strategy.parallel_model.steps._copies._copies

    module = Fit()
    run("hybrid3d", log, lambda: (module, ahead(Drawing())), limit_train_batches=limit)
    assert log.count(SENT_EARLY) == min(limit, STEPS - 1)
    assert len(module.copies._begun) == 0


def test_a_run_that_is_resumed_is_equal(log: Log, tmp_path: Any) -> None:
    class Counting(DataLoader[Any]):
        """Keeps how many batches it gave."""

        given = 0

        def __iter__(self) -> Any:
            for batch in itertools.islice(super().__iter__(), self.given, None):
                self.given += 1
                yield batch

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.given = state["given"]

    def train(strategy: str, kind: type, steps: int, path: Any = None) -> tuple[Net, pl.Trainer]:
        pl.seed_everything(7, verbose=False)
        module = Certain()
        trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=steps)
        data = kind(ToyNumbers(), batch_size=4, num_workers=1, pin_memory=True)
        trainer.fit(module, data, ckpt_path=path)
        return module, trainer

    for kind in DataLoader, Counting:
        found = []
        for strategy in "auto", "hybrid3d":
            file = tmp_path / f"{strategy} {kind.__name__}.ckpt"
            train(strategy, kind, 2)[1].save_checkpoint(file)
            found.append(train(strategy, kind, 4, file)[0].state_dict())
            state = torch.load(file, weights_only=False)["loops"]["fit_loop"]["state_dict"]
            found.append(state)
        assert all(torch.equal(found[0][name], found[2][name]) for name in found[0])
        assert found[1] == found[3]


class Certain(Net):
    """Draws nothing: a plain Trainer does not restore random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()


class ToyNumbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(6.0).view(2, 3) * index / 10
