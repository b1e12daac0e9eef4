"""Batches on their way to a device: which copies begin early, and what is taken."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_par.engine.offload import copy_stream
from lightning_par.engine.offload.copy_stream import BegunCopies
from lightning_par.strategies.data.batch_copies import BatchCopies, has_hook
from lightning_par.upstream.data import pinned_batches, WorkerIterator
from lightning_par.upstream.lightning import next_of_fit


class Stream:
    """Copies on the host, and counts."""

    def __init__(self, device: torch.device) -> None:
        self.sent, self.waits = 0, 0

    def send(self, source: Tensor) -> Tensor:
        self.sent += 1
        return source.clone()

    def receive(self, copy: Tensor) -> None:
        pass

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture(autouse=True)
def _every_tensor_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_stream, "CopyStream", Stream)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)


@pytest.fixture
def copies() -> BegunCopies:
    return BegunCopies(torch.device("cpu"))


def sent(copies: BegunCopies) -> int:
    stream: Any = copies._stream
    return int(stream.sent)


def test_a_copy_is_begun_once_and_taken_once(copies: BegunCopies) -> None:
    x = torch.arange(3.0)
    copies.begin(x)
    copies.begin(x)
    assert sent(copies) == 1
    first, second = copies.take(x), copies.take(x)
    assert sent(copies) == 2
    assert torch.equal(first, x)
    assert first.data_ptr() != second.data_ptr()


def test_what_was_changed_since_is_copied_anew(copies: BegunCopies) -> None:
    x = torch.arange(3.0)
    copies.begin(x)
    x.add_(1)
    assert copies.take(x).tolist() == [1, 2, 3]


def test_a_copy_ends_with_its_tensor(copies: BegunCopies) -> None:
    x = torch.arange(3.0)
    copies.begin(x)
    assert len(copies._begun) == 1
    del x
    assert len(copies._begun) == 0


class Named(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3).as_subclass(Named),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(3, device="meta"),
    ],
)
def test_what_is_more_than_its_memory_is_left_to_others(
    copies: BegunCopies, make: Callable[[], Tensor]
) -> None:
    x = make()
    copies.begin(x)
    assert copies.take(x) is x
    assert sent(copies) == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[:, :-1],
        lambda x: x.transpose(1, 2)[..., 1:],
        lambda x: x[:1].expand(4, 3, 5),
        lambda x: x[0, 0, 0],
        lambda x: x[:0],
    ],
)
def test_pinned_memory_has_the_strides_of_a_plain_copy(
    view: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.empty_like
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: False)
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory: plain(x))
    x = view(torch.arange(30.0).view(2, 3, 5))
    copy = copy_stream._pinned(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.to(torch.float64).stride()


def test_a_host_that_can_lock_no_more_copies_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(Tensor, "is_pinned", lambda _: False)
    monkeypatch.setattr(torch, "empty_like", refuse)
    x = torch.ones(3)
    assert copy_stream._pinned(x) is x


class Moving:
    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: Any) -> "Moving":
        return self


def test_a_batch_keeps_its_form() -> None:
    batch = {"a": [torch.ones(2), "text", None], "b": (Moving(), 3)}
    ours = BatchCopies(pl.LightningModule(), torch.device("cpu"))
    copied = ours.copy(batch)
    assert torch.equal(copied["a"][0], batch["a"][0])
    assert copied["a"][0] is not batch["a"][0]
    assert copied["a"][1:] == ["text", None]
    assert copied["b"] == batch["b"]
    assert ours._copies._stream.waits == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device"])
@pytest.mark.parametrize("of_data", [False, True])
def test_hooks_of_module_and_data_module_are_found(hook: str, of_data: bool) -> None:
    base = pl.LightningDataModule if of_data else pl.LightningModule
    made = type("Mine", (base,), {hook: lambda *_: None})()
    module = pl.LightningModule() if of_data else made
    module._trainer = SimpleNamespace(datamodule=made if of_data else None)
    assert has_hook(module, hook)
    assert not has_hook(module, "on_after_batch_transfer")


def test_a_loader_without_a_pinning_thread_has_no_batches_to_look_at() -> None:
    data = TensorDataset(torch.ones(4))
    iterator = iter(DataLoader(data, num_workers=1))
    assert isinstance(iterator, WorkerIterator)
    assert pinned_batches(iterator) is None
    assert not isinstance(iter(DataLoader(data)), WorkerIterator)


def test_outside_of_a_fit_nothing_comes_next() -> None:
    assert next_of_fit(pl.Trainer(accelerator="cpu", logger=False)) == ([], [])
