"""Batches of any kind, as data loaders of users give them."""

from collections import namedtuple
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn, Tensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

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


@CASES.add(equal="pp2 zero3", large="tp2")
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


class Graphs:
    """Graphs as one: nodes, the graph of each node, edges, and a label for each graph."""

    def __init__(self, numbers: list[int]) -> None:
        sizes = torch.tensor([3 + number % 4 for number in numbers])
        self.of_node = torch.arange(len(numbers)).repeat_interleave(sizes)
        first = (sizes.cumsum(0) - sizes)[self.of_node]
        nodes = torch.arange(len(first))
        self.edges = torch.stack([first, nodes])
        place = torch.tensor(numbers)[self.of_node] * 5 + nodes - first
        self.x = torch.outer(place + 1.0, torch.arange(1.0, 17)).sin().double()
        self.y = torch.tensor(numbers) % 3

    def to(self, device: Any, **_: Any) -> "Graphs":
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        met = torch.zeros_like(x).index_add(0, edges[1], self.other(x[edges[0]]))
        return x + F.gelu(self.own(x) + met)


class GraphModule(LightningModule):
    """Nothing is declared: a part of a batch has too many nodes for its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution() for _ in range(4))
        self.head = nn.Linear(16, 3)

    def pool(self, batch: Graphs) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edges)
        return self.head(
            x.new_zeros(int(batch.of_node.max()) + 1, 16).index_add(0, batch.of_node, x)
        )

    def training_step(self, batch: Graphs, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def loss(self, batch: Graphs) -> Tensor:
        return F.cross_entropy(self.pool(batch), batch.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@CASES.add(
    equal="tp2 pp2_one_microbatch",
    large="zero1 zero3",
    refused={"pp2": r"all 8 samples .* by a number \(graphs, boxes\), use num_microbatches=1\."},
)
def graphs_whose_nodes_name_their_graph() -> Any:
    return GraphModule(), list(range(32)), Graphs


class SquaredGraphs(GraphModule):
    def loss(self, batch: Graphs) -> Tensor:
        return (self.pool(batch).softmax(1) - F.one_hot(batch.y, 3)).square().sum(1).mean()


_DECLARED = (
    r"declare ParallelPlan\(batch=BatchLayout\(whole=\(.*'edges'.*\), "
    r"loss_weight=lambda batch: \.\.\.\)\), where"
)


@CASES.add(refused={"zero1 zero3": _DECLARED})
def graphs_whose_loss_shows_no_rule() -> Any:
    return SquaredGraphs(), list(range(32)), Graphs


@CASES.add(equal="zero1")
def graphs_that_are_declared() -> Any:
    class Module(SquaredGraphs):
        def parallel_plan(self) -> ParallelPlan:
            entries = "of_node", "x", "y", "edges"
            weighed = BatchLayout(whole=entries, loss_weight=lambda batch: len(batch.y))
            return ParallelPlan(batch=weighed)

    return Module(), list(range(28)), Graphs


def of_unequal_graphs(kind: type[GraphModule], **declared: Any) -> Any:
    """Replicas have unequal numbers of graphs in a batch, of which no entry is cut."""

    class Module(kind):  # type: ignore[misc, valid-type]
        def parallel_plan(self) -> ParallelPlan:
            entries = "of_node", "x", "y", "edges"
            return ParallelPlan(batch=BatchLayout(whole=entries, **declared))

    def collate(samples: Any) -> Graphs:
        return Graphs([sample for sample in samples if sample % 8 != 2])

    return Module(), list(range(32)), collate


@CASES.add(equal="zero1")
def unequal_graphs_declared_whole() -> Any:
    return of_unequal_graphs(GraphModule)


@CASES.add(refused={"zero1 zero3": r"whole=\(.*is not known\. .* loss_weight=lambda batch: \.\.\."})
def unequal_graphs_without_a_weight() -> Any:
    return of_unequal_graphs(SquaredGraphs)


@CASES.add(equal="zero1")
def unequal_graphs_with_the_weight_that_is_asked_for() -> Any:
    return of_unequal_graphs(SquaredGraphs, loss_weight=lambda batch: len(batch.y))


class OfTransformers(LightningModule):
    """Nothing is declared, and no entry of its batches has the name that the model gives it."""

    def __init__(self, *, classifies: bool) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_labels": 5}
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 2}
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model: Any = (
            BertForSequenceClassification(BertConfig(**sizes, **drops))
            if classifies
            else LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
        )

    def training_step(self, batch: Any, _: int) -> Tensor:
        if isinstance(batch, Tensor):  # tokens, which are the labels, too
            batch = batch, batch
        tokens, labels = batch.values() if isinstance(batch, dict) else batch
        loss: Tensor = self.model(tokens, labels=labels).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2 zero1", tolerance=1e-6)
def tokens_and_labels_of_a_causal_model() -> Any:
    return OfTransformers(classifies=False), [(x, x) for x, _ in token_pairs()]


@CASES.add(equal="tp2 pp2 zero1", tolerance=1e-6)
def tokens_alone() -> Any:
    return OfTransformers(classifies=False), [x for x, _ in token_pairs()]


@CASES.add(equal="tp2 pp2", large="tp2pp2 zero3", tolerance=1e-6)
def other_names_of_the_inputs_of_a_classifier() -> Any:
    pairs = enumerate(token_pairs())
    samples = [{"text": x, "kind": torch.tensor(i % 5)} for i, (x, _) in pairs]
    return OfTransformers(classifies=True), samples


class TimeFirst(PlainModule):
    """Its batches are [T, B], and T is B, which hides the batch dim."""

    batch = BatchLayout()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = self.net(x.T).permute(1, 0, 2)
        assert len(scores) == 12
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def time_first(samples: Any) -> Any:
    x, y = stack(samples)
    return x.T.contiguous(), y.T.contiguous()


@CASES.add(
    refused={"pp2": r"declare ParallelPlan\(batch=BatchLayout\(batch_dims={entry: dim}\)\)"},
    batch_size=12,
)
def a_batch_dim_that_is_not_the_first() -> Any:
    return TimeFirst(), token_pairs(48), time_first


@CASES.add(equal="pp2", batch_size=12)
def a_batch_dim_that_is_declared() -> Any:
    class Module(TimeFirst):
        batch = BatchLayout(batch_dims={"0": 1, "1": 1})

    return Module(), token_pairs(48), time_first


class ThreeKinds(PlainModule):
    """Positions of three kinds, [3, B, T], in batches of three samples; the step reads the last
    kind before the model: of a part of the batch, the first stage fails.
    """

    batch = BatchLayout()

    def parallel_plan(self) -> ParallelPlan:
        return replace(super().parallel_plan(), batch=self.batch)

    def loss(self, batch: Any) -> Tensor:
        x, kinds, y = batch
        scores = self.net((x + kinds[0] + kinds[2]) % 8)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def three_kinds(samples: Any) -> Any:
    x, y = stack(samples)
    return x, torch.arange(3)[:, None, None] + torch.arange(x.shape[1]).expand(len(x), -1), y


@CASES.add(
    refused={"pp2": r"all 3 samples at once the step runs.*BatchLayout\(batch_dims="}, batch_size=3
)
def kinds_of_positions_as_many_as_samples() -> Any:
    return ThreeKinds(), token_pairs(24), three_kinds


@CASES.add(equal="pp2", batch_size=3)
def kinds_of_positions_whose_batch_dim_is_declared() -> Any:
    class Module(ThreeKinds):
        batch = BatchLayout(batch_dims={"1": 1})

    return Module(), token_pairs(24), three_kinds


class HalfLabeled(PlainModule):
    """Every second batch has no labels."""

    def loss(self, batch: Any) -> Tensor:
        scores = self.net(batch["x"])
        if batch.get("y") is None:
            return scores.square().mean()
        return F.cross_entropy(scores.flatten(0, 1), batch["y"].flatten())


def half_labeled(*, absent: bool) -> Any:
    given = count()

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        batch = {"x": x, "y": y if next(given) % 2 == 0 else None}
        return {k: v for k, v in batch.items() if v is not None} if absent else batch

    return collate


@CASES.add(
    refused={"pp2 zero3": "the batch has no entry 'y'.*declare none, as in .*BatchLayout\\(\\)\\)"}
)
def labels_that_some_batches_lack() -> Any:
    class Module(HalfLabeled):
        batch = BatchLayout(labels="y")

    return Module(), token_pairs(), half_labeled(absent=False)


@CASES.add(equal="pp2 zero3")
def labels_that_some_batches_lack_and_no_one_names() -> Any:
    class Module(HalfLabeled):
        batch = BatchLayout()

    return Module(), token_pairs(), half_labeled(absent=True)


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


@CASES.add(equal="pp2_one_microbatch zero3", refused={"pp2": r"(?s)whole=.*num_microbatches=1"})
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
