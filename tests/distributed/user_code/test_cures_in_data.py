"""What a mesh refuses of batches and draws, and the same with the data that the refusal advises."""

import warnings
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM

from lightning_par import BatchLayout
from tests.support.cures import Cures
from tests.support.models.plain_language_model import (
    AttendingNet,
    PlainModule,
    PlainNet,
    token_pairs,
)

CURES = Cures(__name__)
CASES = CURES.cases


def stack(samples: Any) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def each_loss(module: PlainModule, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(module.net(x).transpose(1, 2), y, reduction="none").mean(1)


@CURES.add("LP302", r"the batch has no entry 'weights'.*to every batch, with ones where all")
def weights_that_some_batches_lack(cured: bool) -> Any:
    class Module(PlainModule):
        batch = BatchLayout(loss_weight="weights")

        def loss(self, batch: Any) -> Tensor:
            losses = each_loss(self, batch["x"], batch["y"])
            weights = batch.get("weights", torch.ones_like(losses))
            return (losses * weights).sum() / weights.sum()

    given = count()

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        weights = 1 + torch.arange(len(x), dtype=torch.float64)
        if next(given) % 2:
            return {"x": x, "y": y, **({"weights": torch.ones_like(weights)} if cured else {})}
        return {"x": x, "y": y, "weights": weights}

    return Module(), token_pairs(), collate


@CURES.add("LP322", r"declares, or be weighted by BatchLayout\(loss_weight=", "cp2")
def class_weights_on_divided_sequences(cured: bool) -> Any:
    classes = torch.linspace(0.1, 3.0, 64, dtype=torch.float64)

    class Module(PlainModule):
        batch = BatchLayout(
            sequence_dims={"0": 1, "1": 1},
            labels="1",
            loss_weight=(lambda batch: classes[batch[1]].sum()) if cured else None,
        )

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), classes)

    return Module(AttendingNet())


@CURES.add("LP322", r"same calls of self\.log \('marked'\).*Log the same names in the same", "cp2")
def a_number_that_only_ranks_with_some_tokens_log(cured: bool) -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            marked = (batch[0] == 63).sum().double()
            if cured or marked:
                self.log("marked", marked, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            assert self.trainer.callback_metrics["marked"] == 8  # one in each sample

    samples = [(x % 63, y) for x, y in token_pairs()]
    for x, _ in samples:
        x[0] = 63
    return Module(AttendingNet()), samples


@CURES.add("LP325", r"to a different value for each.*set the value in on_train_batch_end", "zero1")
def a_rate_by_the_loss(cured: bool) -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if not cured:
                self._set(loss)
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            if cured:
                self._set(outputs["loss"])

        def _set(self, loss: Any) -> None:
            optimizer: Any = self.optimizers()
            optimizer.param_groups[0]["lr"] = 0.1 * float(loss)

    return Module()


@CURES.add("LP309", r"write:\n  - .* draws from its own generator, draw them in the dataset")
def weights_from_a_generator_of_the_step(cured: bool) -> Any:
    generator = np.random.default_rng(1)

    def draw(size: int) -> Tensor:
        return torch.from_numpy(generator.random(size))

    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch[:2]
            weights = batch[2] if cured else draw(len(x))
            return (each_loss(self, x, y) * weights).mean()

    def collate(samples: Any) -> Any:
        return [*stack(samples), *([draw(len(samples))] if cured else [])]

    return Module(), token_pairs(), collate


def _padded(longest: int | None = None) -> Any:
    """A collate function that pads rows to the longest of them, or to one length, with zeros."""

    def collate(samples: Any) -> list[Tensor]:
        size = longest or max(len(x) for x, _ in samples)
        return stack([[F.pad(row, (0, size - len(row))) for row in pair] for pair in samples])

    return collate


def _ragged_pairs() -> list[Any]:
    sizes = [4 + 5 * index % 9 for index in range(32)]
    return [(x[:size], y[:size]) for (x, y), size in zip(token_pairs(), sizes, strict=True)]


class _RegressesTokens(PlainModule):
    batch = BatchLayout()
    leaves_padding_out = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        errors = (self.net(x).mean(-1) - y / 64).square()
        weights = (x > 0).to(errors.dtype) if self.leaves_padding_out else torch.ones_like(errors)
        return (errors * weights).sum() / weights.sum()


@CURES.add("LP327", r"padding changes the loss.*pad all batches to one length", "zero3")
def padding_of_other_lengths(cured: bool) -> Any:
    return _RegressesTokens(), _ragged_pairs(), _padded(12 if cured else None)


@CURES.add("LP327", r"padding changes the loss.*divide by the sum of a mask", "zero1")
def padding_in_a_mean(cured: bool) -> Any:
    module = _RegressesTokens()
    module.leaves_padding_out = cured
    return module, _ragged_pairs(), _padded()


@CURES.add("LP327", r"padding changes the loss.*pad all batches to one length", "zero1")
def padding_that_labels_leave_out_and_the_model_reads(cured: bool) -> Any:
    class Module(PlainModule):
        batch = BatchLayout()

        def loss(self, batch: Any) -> Tensor:
            scores = self.net(batch[0])
            scores = scores + scores.mean(1, keepdim=True)
            return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), ignore_index=0)

    return Module(), _ragged_pairs(), _padded(12 if cured else None)


@CURES.add("LP327", r"padding changes the loss.*pad all batches to one length", "zero1")
def padding_that_comes_later(cured: bool) -> Any:
    """The first batch has rows of one length."""
    pairs = _ragged_pairs()
    pairs[:8] = token_pairs()[:8]
    return _RegressesTokens(), pairs, _padded(12 if cured else None)


class Pairs(Dataset[Any]):
    """Samples with a number that is drawn when they are asked for."""

    def __init__(self, draw: Any) -> None:
        self.pairs, self.draw = token_pairs(), draw

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int) -> Any:
        return *self.pairs[place], self.draw()


def drawing(draw_in_step: Any, draw_in_data: Any) -> Any:
    """A module that weighs its samples by numbers that its step or its data set draws."""

    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch[:2]
            losses = each_loss(self, x, y)
            weights = batch[2] if draw_in_data else draw_in_step(losses)
            return (losses * weights.to(losses)).mean()

    return Module(), Pairs(draw_in_data) if draw_in_data else token_pairs()


@CURES.add("LP311", r"with NumPy or Python .*Draw the numbers with torch .* or in the data set")
def numbers_of_numpy_in_the_data_set(cured: bool) -> Any:
    return drawing(
        lambda losses: torch.from_numpy(np.random.rand(len(losses))),
        np.random.rand if cured else None,
    )


@CURES.add("LP311", r"calls poisson for each sample.*Draw the numbers in the data set")
def numbers_by_values_in_the_data_set(cured: bool) -> Any:
    rate = torch.tensor(3.0)
    return drawing(
        lambda losses: torch.poisson(rate.expand(len(losses))),
        (lambda: torch.poisson(rate)) if cured else None,
    )


@CURES.add("LP311", r"do not show which random .*Draw the numbers in the data set")
def numbers_of_no_single_sample_in_the_data_set(cured: bool) -> Any:
    return drawing(
        lambda losses: torch.rand(len(losses) + 1).diff(),
        (lambda: torch.rand(2).diff()[0]) if cured else None,
    )


class LeavesOut(PlainModule):
    """Leaves out the batches whose first sample begins with a 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 0] == 0 else loss


@CURES.add("LP318", r"To skip a batch because of its data, remove its samples", "zero1")
def samples_left_out_of_the_data_set(cured: bool) -> Any:
    pairs = [(1 + x % 60, y) for x, y in token_pairs(64)]
    pairs[9][0][0] = 0
    return LeavesOut(), [pair for pair in pairs if not cured or pair[0][0] > 0]


@CURES.add("LP406", r"to skip a batch, remove it in the data set or collate_fn")
def batches_left_out_in_the_collate_function(cured: bool) -> Any:
    pairs = [(1 + x % 60, y) for x, y in token_pairs(64)]
    pairs[8][0][0] = 0

    class Module(LeavesOut):
        def loss(self, batch: Any) -> Tensor:
            if batch[0][0, 0] == 0 and self.net.training:
                return torch.zeros((), requires_grad=True)
            return super().loss(batch)

    def collate(samples: Any) -> Any:
        warnings.filterwarnings("ignore", "train_dataloader yielded None")  # as it should
        return None if cured and samples[0][0][0] == 0 else stack(samples)

    return Module(), pairs, collate


class Cutting(PlainModule):
    """Leaves out of its batches what is padding in all of their samples."""

    def loss(self, batch: Any) -> Tensor:
        x, y = cut(batch)
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=0)


def cut(batch: Any) -> Any:
    length = int((batch[1] != 0).sum(1).max())
    return [entry[:, :length] for entry in batch]


@CURES.add("LP405", r"has a different shape than before.*Cut or pad .* in the collate_fn")
def batches_cut_in_the_collate_function(cured: bool) -> Any:
    pairs = [(1 + x % 60, 1 + y % 60) for x, y in token_pairs()]
    for place, pair in enumerate(pairs):
        for row in pair:
            row[12 - place // 8 :] = 0
    return Cutting(), pairs, lambda samples: cut(stack(samples)) if cured else stack(samples)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, h: Tensor, scale: Any) -> Any:
        return h + scale * torch.tanh(self.inner(h)), scale


@CURES.add("LP405", r"a non-tensor value .* has changed.*Return the value that changes as a")
def a_number_that_changes_handed_on_as_a_tensor(cured: bool) -> Any:
    class Net(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            scale: Any = 1 / (1 + self.step)
            scale = h.new_tensor(scale) if cured else scale
            for block in self.blocks:
                h, scale = block(h, scale)
            out: Tensor = self.head(self.norm(h))
            return out

    class Module(PlainModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net.step = batch_idx  # type: ignore[assignment]

    return Module(Net())


@CURES.add("LP325", r"changes the shape of the buffer total .*largest shape in __init__", "zero1")
def a_sum_of_the_largest_shape(cured: bool) -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3 if cured else 2))

        def loss(self, batch: Any) -> Tensor:
            kinds = 3 if self.global_step > 1 else 2
            if kinds > len(self.total):
                self.total = F.pad(self.total, (0, 1))
            found = torch.bincount(batch[0].flatten() % kinds, minlength=len(self.total))
            self.total = self.total + found
            return super().loss(batch)

    return Module()


def documents(lengths: list[int]) -> Any:
    """A model of transformers without a cache, and rows with documents of these lengths."""

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
            sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2}
            sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            self.model: Any = BertForMaskedLM(BertConfig(**sizes))

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    places = torch.cat([torch.arange(length) for length in lengths])
    rows = [x for x, _ in token_pairs()]
    return Module(), [{"input_ids": x, "labels": x, "position_ids": places} for x in rows]


@CASES.add(refused={"cp2": "do not always increase by 1 inside a row.*one document in each row"})
def several_documents_in_a_row() -> Any:
    return documents([5, 7])


@CASES.add(equal="cp2", tolerance=1e-6)
def one_document_in_a_row() -> Any:
    return documents([12])


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)
