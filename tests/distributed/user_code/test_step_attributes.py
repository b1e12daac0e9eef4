"""What steps collect in attributes of the module, for hooks at the end of an epoch."""

import re
import warnings
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from lightning_par import BatchLayout, Hybrid3DStrategy, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Meter:
    """A sum that a user's class keeps."""

    def __init__(self) -> None:
        self.total, self.seen = 0.0, list[Tensor]()


class Guess(NamedTuple):
    """What a step finds, as a tuple with names."""

    guesses: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Found:
    """What a step finds, as an object."""

    guess: Guess
    output: CausalLMOutput


class Store(nn.Module):
    """A submodule that keeps outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []


class Collecting(PlainModule):
    """Collects as users of Lightning 2 do: in lists, in a dict of lists, in a sum and a buffer, in
    a list for each loader, in an object and in a submodule.
    """

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.of_loaders: list[list[dict[str, Tensor]]] = [[], []]
        self.meter, self.store = Meter(), Store()
        self.losses: list[Tensor] = []
        self.found: list[Found] = []
        self.outputs: dict[str, list[Tensor]] = {"guesses": [], "labels": []}
        self.correct, self.summary = 0, ""
        self.window, self.classes = deque[int](maxlen=20), set[int]()
        self.recent, self.last = [0, 0, 0], [0]
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = len(batch[0])
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        self.recent[batch_idx % 3] = batch_idx
        self.last.clear(), self.last.append(batch_idx)
        self.window.extend(batch[1][:, 0].tolist())
        self.classes.update(batch[1].flatten().tolist())
        self.total += loss.detach() * self.seen
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.log("window", sum(n * v for n, v in enumerate(self.window)) + len(self.window) / 2)
        self.log(
            "recent", float(sum(n * 10**at for at, n in enumerate([*self.recent, *self.last])))
        )
        self.log("classes", float(sum(self.classes)))
        self.log("total", self.total)
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        logits = self.net(tokens)
        self.outputs["guesses"].append(logits.argmax(-1))
        self.outputs["labels"].append(labels)
        self.of_loaders[1].append({"labels": labels})
        self.meter.total += float(labels.sum())
        self.meter.seen.append(labels)
        self.store.kept.append(labels)
        output = CausalLMOutput(logits=logits)
        self.found.append(Found(Guess(logits.argmax(-1), labels), output))
        self.correct += int((logits.argmax(-1) == labels).sum())
        self.summary = f"{self.correct} were right"
        self.log("val", F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def on_validation_epoch_end(self) -> None:
        guesses, labels = (torch.cat(self.outputs[name]) for name in ("guesses", "labels"))
        assert guesses.shape == labels.shape == (16, labels.shape[1])
        kept = torch.cat([entry["labels"] for entry in self.of_loaders[1]])
        for other in (kept, torch.cat(self.meter.seen), torch.cat(self.store.kept)):
            assert torch.equal(other, labels)
        assert self.meter.total == float(labels.sum())
        found = [each.guess for each in self.found], [each.output.logits for each in self.found]
        assert torch.equal(torch.cat([each.guesses for each in found[0]]), guesses)
        assert torch.equal(torch.cat([each.labels for each in found[0]]), labels)
        assert torch.equal(torch.cat(found[1]).argmax(-1), guesses)
        self.of_loaders[1].clear(), self.store.kept.clear(), self.found.clear()
        self.meter = Meter()
        assert self.summary == f"{self.correct} were right"
        self.log("accuracy", (guesses == labels).double().mean())
        self.log("correct", float(self.correct))
        self.outputs = {"guesses": [], "labels": []}
        self.correct = 0


def _train(rank: int, world: int, layout: str | None, schedule: str = "1f1b") -> Any:
    seed_everything(0, verbose=False)
    samples, module = token_pairs(), Collecting().double()
    strategy: Any = "auto"
    if layout is not None:
        strategy = Hybrid3DStrategy(**LAYOUTS[layout], schedule=schedule)
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=2, num_sanity_val_steps=2
    )
    trainer.fit(module, DataLoader(samples, 8), DataLoader(samples[:16], 8))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found, float(module.total), module.seen * 0


@pytest.mark.parametrize(
    ("layout", "schedule"), [("tp2", "1f1b"), ("pp2", "1f1b"), ("pp2", "zbv"), ("tp2pp2", "1f1b")]
)
def test_every_rank_reads_what_one_process_has_collected(layout: str, schedule: str) -> None:
    (metrics, total, _) = _train(0, 1, None)
    torch.set_default_dtype(torch.float32)
    world = 4 if layout == "tp2pp2" else 2
    for found, found_total, _ in run_ranks(_train, world, layout, schedule, timeout=180):
        assert found == pytest.approx(metrics, rel=1e-6)
        assert found_total == pytest.approx(total)


class Returning(PlainModule):
    """Returns numbers beside the loss, for hooks that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.had: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        count, right = batch[1].numel(), logits.argmax(-1) == batch[1]
        found = {"count": count, "tensor": torch.tensor(count), "pair": (len(batch[0]), 0.5)}
        found |= {"right": int(right.sum()), "share": float(right.double().mean())}
        return {"loss": loss, "width": batch[0].shape[1], **found}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch))
        return {"count": batch[1].numel(), "most": int(batch[1].sum(1).max())}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        (size, half), others = outputs["pair"], outputs
        kept = {name: v for name, v in others.items() if name not in ("pair", "loss")}
        self.had = {**kept, "size": size, "half": half}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.had |= {f"val_{name}": value for name, value in outputs.items()}


def _return(
    rank: int, world: int, layout: str | None, plan: dict[str, Any], kind: Any = Returning
) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout], **plan)
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=2)
    module, data = kind().double(), DataLoader(token_pairs(), 8)
    trainer.fit(module, data, DataLoader(token_pairs()[:8], 8))
    return {name: (type(value), float(value)) for name, value in module.had.items()}


class Undivided(Returning):
    """Has the look compare nothing."""

    def parallel_plan(self) -> ParallelPlan:
        return replace(super().parallel_plan(), batch=BatchLayout(local_statistics=True))


def _warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # whatever an earlier test of this process has left
        _return(rank, world, "pp2", {}, Undivided)
    return [str(warning.message) for warning in caught]


def test_counts_that_nothing_tells_are_named() -> None:
    told = " ".join(run_ranks(_warned, 2, timeout=180)[0])
    assert re.search(r"training_step\(\)\['count'\].* is not known.*num_microbatches=1", told)


class Leaving(Returning):
    """Leaves numbers of the batch in attributes, for hooks that read them."""

    tokens, share, seen = 32, 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tokens, self.width = batch[1].numel(), batch[0].shape[1]
        logits = self.net(batch[0])
        self.seen += batch[1].numel()
        self.share = float((logits.argmax(-1) == batch[1]).double().mean())
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.had = {name: getattr(self, name) for name in ("tokens", "width", "share", "seen")}


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_numbers_that_a_step_leaves_in_attributes_are_those_of_the_batch(layout: str) -> None:
    one = _return(0, 1, None, {}, Leaving)
    torch.set_default_dtype(torch.float32)
    for found in run_ranks(_return, 2, layout, {"verify": False}, Leaving, timeout=180):
        assert found == {name: (kind, pytest.approx(n)) for name, (kind, n) in one.items()}


@pytest.mark.parametrize("verify", ["auto", False])
def test_numbers_that_a_pipelined_step_returns_are_those_of_the_batch(verify: Any) -> None:
    one = _return(0, 1, None, {})
    torch.set_default_dtype(torch.float32)
    for found in run_ranks(_return, 2, "pp2", {"verify": verify}, timeout=180):
        assert found == one


class Averaging(PlainModule):
    """Takes the mean of the losses of validation at the end of its epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.last = list[Tensor](), torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(super().loss(batch))
        self.last = batch[0]  # which no hook reads

    def on_validation_epoch_end(self) -> None:
        self.log("val", torch.stack(self.losses).mean(), sync_dist=True)

    def on_validation_start(self) -> None:
        self.losses.clear()


class Joining(Averaging):
    def on_validation_epoch_end(self) -> None:
        self.log("val", self.all_gather(torch.stack(self.losses)).mean(), sync_dist=True)


def _validate(rank: int, world: int, layout: str | None, kind: type[Averaging]) -> Any:
    torch.manual_seed(0)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true")
    loader: Any = DataLoader(token_pairs(12), 8 if layout in (None, "tp2") else 4)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found,) = trainer.validate(kind(), loader, verbose=False)
    return found["val"], [str(w.message) for w in caught if "stores values" in str(w.message)]


def test_a_mean_of_what_a_replica_has_kept_is_told() -> None:
    """The last batch has fewer samples, and the mean of means over 8 and 4 is kept on tp alone."""
    wanted, _ = _validate(0, 1, None, Averaging)
    (found, told), _ = run_ranks(_validate, 2, "tp2", Averaging)
    assert (found, told) == (pytest.approx(wanted), [])
    (_, told), _ = run_ranks(_validate, 2, "zero0", Averaging)
    assert len(told) == 1
    assert re.search(r"in self\.losses, which on_validation_epoch_end reads\. Each of 2", told[0])
    (_, told), _ = run_ranks(_validate, 2, "zero0", Joining)
    assert told == []
