"""Batches of any kind, as data loaders of users give them."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Book:
    tokens: Tensor
    labels: Tensor
    source: str


class Holder:
    """An object with `to`, as graph libraries have it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **_: Any) -> "Holder":
        return Holder(self.x.to(device), self.y.to(device))


class Undeclared(PlainModule):
    """Its plan says nothing of the batch."""

    batch = BatchLayout()


def stack(samples: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([a for a, _ in samples]), torch.stack([b for _, b in samples])


def per_sample(module: PlainModule, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x).transpose(1, 2), y, reduction="none").mean(1)


@CASES.add(equal="tp2 pp2 zero3")
def data_class() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(sequence_dims={"tokens": 1, "labels": 1}, labels="labels")

        def unpack(self, batch: Any) -> Any:
            assert batch.source == "books"
            return batch.tokens, batch.labels

    return Module(), token_pairs(), lambda samples: Book(*stack(samples), "books")


@CASES.add(equal="pp2 zero3")
def object_with_to() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(sequence_dims={"x": 1, "y": 1}, labels="y")

        def unpack(self, batch: Any) -> Any:
            return batch.x, batch.y

    return Module(), token_pairs(), lambda samples: Holder(*stack(samples))


@CASES.add(equal="pp2")
def named_tuple_by_name() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(sequence_dims={"x": 1, "y": 1}, labels="y")

    return Module(), token_pairs(), lambda samples: Pair(*stack(samples))


@CASES.add(equal="pp2 zero3")
def texts_tokenized_in_the_step() -> Any:
    class Module(Undeclared):
        def unpack(self, batch: Any) -> Any:
            codes = [[ord(letter) % 64 for letter in text] for text in batch]
            ids = torch.tensor(codes, device=self.device)
            return ids[:, :-1], ids[:, 1:]

    letters = "abcdefghijklm"
    return Module(), [letters[i % 7 :] + letters[: i % 7] for i in range(32)], list


@CASES.add(equal="pp2 zero3")
def weights_of_samples_in_a_list() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            losses = per_sample(self, batch["x"], batch["y"])
            return (losses * losses.new_tensor(batch["weight"])).mean()

    def collate(samples: Any) -> Any:
        x, y = stack([pair for pair, _ in samples])
        return {"x": x, "y": y, "weight": [weight for _, weight in samples]}

    return Module(), [(pair, float(i % 4)) for i, pair in enumerate(token_pairs())], collate


@CASES.add(equal="pp2 zero3")
def nested_lists_of_unequal_samples() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__(nn.Module())
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 1)

        def loss(self, batch: Any) -> Tensor:
            images, targets = batch
            x = torch.stack([self.stem(image[None]).mean((2, 3))[0] for image in images])
            for block in self.blocks:
                x = block(x).tanh()
            return F.mse_loss(self.head(x)[:, 0], torch.stack([t["box"].sum() for t in targets]))

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="blocks")

        lr = 0.05

    samples = [(torch.randn(3, 6 + i % 3, 6), {"box": torch.randn(4)}) for i in range(32)]
    return Module(), samples, lambda s: ([a for a, _ in s], [b for _, b in s])


def class_weights(first: bool, layout: BatchLayout) -> Any:
    class Module(PlainModule):
        batch = layout

        def loss(self, batch: Any) -> Tensor:
            logits, labels = self.net(batch["x"]).flatten(0, 1), batch["y"].flatten()
            return F.cross_entropy(logits, labels, weight=batch["classes"])

    weights = torch.rand(64, dtype=torch.float64) + 0.5

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        known, rest = {"classes": weights}, {"x": x, "y": y}
        return {**known, **rest} if first else {**rest, **known}

    return Module(), token_pairs(), collate


@CASES.add(equal="pp2 zero3")
def class_weights_stand_first() -> Any:
    return class_weights(True, BatchLayout())


@CASES.add(equal="pp2 zero0")
def class_weights_declared() -> Any:
    def weigh(batch: Any) -> Tensor:
        return batch["classes"][batch["y"]].sum()

    return class_weights(False, BatchLayout(whole=("classes",), loss_weight=weigh))


def table(layout: BatchLayout) -> Any:
    class Module(PlainModule):
        batch = layout

        def loss(self, batch: Any) -> Tensor:
            x, y, pairs = batch
            return (per_sample(self, x, y) * pairs.sum()).mean()

    pairs = torch.rand(8, 3) / 20
    return Module(), token_pairs(), lambda samples: (*stack(samples), pairs)


@CASES.add(equal="pp2_one_microbatch zero3", refused={"pp2": r"whole=.*num_microbatches=1"})
def table_with_as_many_rows_as_samples() -> Any:
    return table(BatchLayout())


@CASES.add(equal="pp2")
def table_declared_whole() -> Any:
    return table(BatchLayout(whole=("2",)))


@CASES.add(equal="pp2_one_microbatch", refused={"pp2 zero3": "'cu' has 3.*batch_dims"})
def packed_sequences() -> Any:
    class Module(Undeclared):
        def unpack(self, batch: Any) -> Any:
            assert batch["cu"][-1] == len(batch["x"])
            return batch["x"][None], batch["y"][None]

    def pack(samples: Any) -> Any:
        x, y = (torch.cat(column[:2]) for column in zip(*samples, strict=True))
        return {"x": x, "y": y, "cu": torch.tensor([0, 12, 24])}

    return Module(), token_pairs(), pack


@CASES.add(equal="pp2 zero3")
def batch_dim_last() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(batch_dims={"0": 1, "1": 1})

        def unpack(self, batch: Any) -> Any:
            return batch[0].T, batch[1].T

    return Module(), token_pairs(), lambda samples: tuple(t.T for t in stack(samples))


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
