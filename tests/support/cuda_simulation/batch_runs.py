"""Runs whose batches are copied to the simulated device, and what they say of it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_par  # noqa: F401 - registers the strategies
from lightning_par.engine.offload.copy_stream import CopyStream
from lightning_par.strategies.data.batch_copies import BatchCopies
from tests.support.parity import quiet_trainer

__all__ = [
    "SENT_EARLY",
    "STEPS",
    "Drawing",
    "Log",
    "Losses",
    "Net",
    "Repeated",
    "Streaming",
    "ahead",
    "first",
    "run",
    "same",
]

STEPS = 5
SENT_EARLY = "begun"


class Told(NamedTuple):
    """What a run says: losses, weights at the end, and how many batches were begun early."""

    losses: list[float]
    weights: dict[str, Tensor]
    early: int


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train_loss"]))


class Log:
    """Notes in order what happens to copies and steps; waits until workers have sent their next."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        begin, send = BatchCopies.begin_next, CopyStream.send

        def begin_next(copies: Any) -> None:
            self.early = True
            wait_for_workers(copies._module.trainer)
            begin(copies)
            self.early = False

        def sent(stream: Any, source: Tensor) -> Tensor:
            pinned = "pinned" if source.is_pinned() else "pageable"
            self.events.append(f"{SENT_EARLY if self.early else 'sent'} {pinned}")
            copy = send(stream, source)
            assert copy.device.type == "cuda"
            return copy

        self.early = False
        patch.setattr(BatchCopies, "begin_next", begin_next)
        patch.setattr(CopyStream, "send", sent)

    def count(self, kind: str) -> int:
        return sum(event.startswith(kind) for event in self.events)


def wait_for_workers(trainer: pl.Trainer) -> None:
    """Wait until every loader's thread has pinned what its workers were asked for."""
    for iterator in trainer.fit_loop._data_fetcher.combined_loader._iterator.iterators:
        queue = getattr(iterator, "_data_queue", None)
        held = getattr(iterator, "_task_info", {})
        while hasattr(queue, "mutex") and not queue.queue and held and iterator._tasks_outstanding:
            torch.accelerator.current_stream()  # lets other threads run
            with queue.not_empty:
                queue.not_empty.wait(0.01)


class Net(pl.LightningModule):
    """Takes a batch of any form; draws random numbers of host and device in its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = [self.values(batch)] if isinstance(batch, Tensor) else self.values(batch)
        x = torch.cat([x.reshape(-1, 3).to(self.layer.weight.dtype) for x in found])
        assert x.device.type == "cuda"
        x = torch.nn.functional.dropout(x, 0.2) * (1 + torch.rand(()).item())
        loss = self.layer(x).square().mean()
        self.log("train_loss", loss)
        return loss

    def values(self, batch: Any) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class Drawing(Dataset[Tensor]):
    """Draws its samples, in the process that asks for them, and from a given form."""

    def __init__(self, size: int = 4 * STEPS, form: Callable[[Tensor], Any] | None = None) -> None:
        self.size, self.form = size, form

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.rand(2, 3) + index
        return x if self.form is None else self.form(x)


class Repeated(IterableDataset[Tensor]):
    """Yields one tensor again and again, and changes it in place."""

    def __init__(self, *, pinned: bool = False, sized: bool = False) -> None:
        self.held, self.sized = torch.zeros(4, 3, pin_memory=pinned), sized

    def __iter__(self) -> Iterator[Any]:
        for step in range(STEPS):
            torch.cuda.synchronize()  # else the host changed memory that is being copied
            self.held.copy_(torch.rand(4, 3)).add_(step)
            yield self.held


class Streaming(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.rand(4, 3) + step for step in range(STEPS))


def first(samples: list[Any]) -> Any:
    return samples[0]


def ahead(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """A loader whose batches can be begun early."""
    batches = {} if isinstance(data, IterableDataset) else {"batch_size": 4, "shuffle": True}
    return DataLoader(data, **{**batches, "num_workers": 1, "pin_memory": True, **options})


def run(strategy: Any, log: Log, make: Callable[[], Any], **options: Any) -> Told:
    """Train, and say what came out."""
    pl.seed_everything(7, verbose=False)
    log.events.clear()
    module, losses = make(), Losses()
    module, data = module if isinstance(module, tuple) else (module, None)
    chosen = {"max_epochs": 1, "callbacks": [losses], "devices": 1, **options}
    trainer = quiet_trainer(strategy=strategy, **chosen)
    trainer.fit(module, **({} if data is None else {"train_dataloaders": data}))
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    weights["next random number"] = torch.rand(())
    return Told(losses.found, weights, log.count(SENT_EARLY))


def same(log: Log, make: Callable[[], Any], **options: Any) -> Told:
    """Train under a plain Trainer and on a mesh of one; return the second, which is the same."""
    plain, ours = run("auto", log, make, **options), run("hybrid3d", log, make, **options)
    assert len(plain.losses) > 1
    assert ours.losses == plain.losses
    assert all(torch.equal(ours.weights[name], value) for name, value in plain.weights.items())
    return ours
