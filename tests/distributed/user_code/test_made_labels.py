"""Losses over labels that the step makes, masks or chooses by itself, on batches without a plan.

Rows are padded with 1, and the mask of a row is that of its inputs: shifted by one token it counts
as many as the labels do, but for rows without padding. The first batch has no such row.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan
from tests.distributed.user_code.test_batches import Undeclared
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
PAD = 1


def rows() -> list[dict[str, Tensor]]:
    made = []
    for index, row in enumerate(torch.randint(2, 64, (32, 13))):
        count = 3 + index % 5 if index < 8 else 5 + index % 8
        row[count + 1 :] = PAD
        made.append({"x": row[:-1], "y": row[1:], "mask": (row[:-1] != PAD).long()})
        made[-1]["prompt"] = torch.tensor(count // 2)
    return made


def of_labels(labels: Callable[[Any], Tensor], **options: Any) -> Any:
    """A module whose loss is a cross-entropy with labels of the batch, and its samples."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            wanted = labels(batch)
            return F.cross_entropy(self.net(batch["x"]).flatten(0, 1), wanted.flatten(), **options)

    return Module(), rows()


@CASES.add(equal="pp2 zero3")
def a_padding_token_that_the_call_ignores() -> Any:
    return of_labels(lambda batch: batch["y"], ignore_index=PAD)


@CASES.add(equal="pp2 zero3")
def a_copy_that_is_masked_in_place() -> Any:
    def labels(batch: Any) -> Tensor:
        made = batch["y"].clone()
        made[:, :2] = -100
        made[batch["mask"] == 0] = -100
        return made

    return of_labels(labels, label_smoothing=0.1)


@CASES.add(equal="pp2 zero3")
def a_prompt_of_another_length_in_each_row() -> Any:
    def labels(batch: Any) -> Tensor:
        places = torch.arange(batch["x"].shape[1], device=batch["x"].device)
        hidden = (places < batch["prompt"][:, None]) | (batch["y"] == PAD)
        return torch.where(hidden, -100, batch["y"])

    return of_labels(labels)


@CASES.add(equal="pp2 zero3")
def a_batch_that_the_step_writes_to() -> Any:
    def labels(batch: Any) -> Tensor:
        batch["x"].add_(1).remainder_(64)
        batch["y"][batch["y"] % 7 == 0] = -100
        return batch["y"]

    return of_labels(labels)


@CASES.add(equal="pp2 zero3")
def tokens_that_a_condition_chooses() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            chosen = (batch["y"] != PAD) & (batch["y"] % 3 != 0)
            return F.cross_entropy(self.net(batch["x"])[chosen], batch["y"][chosen])

    return Module(), rows()


@CASES.add(equal="pp2 zero3")
def a_bounded_divisor() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"]).transpose(1, 2)
            losses = F.cross_entropy(logits, batch["y"], reduction="none")
            counts = (batch["y"] % 5 > 2).to(losses.dtype)
            return (losses * counts).sum() / counts.sum().clamp(min=1)

    return Module(), rows()


@CASES.add(equal="pp2 zero3")
def class_weights_in_a_buffer() -> Any:
    class Module(Undeclared):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("classes", torch.linspace(0.1, 3, 64))

        def loss(self, batch: Any) -> Tensor:
            given = {"weight": self.classes, "ignore_index": PAD}
            return F.cross_entropy(
                self.net(batch["x"]).flatten(0, 1), batch["y"].flatten(), **given
            )

    return Module(), rows()


@CASES.add(equal="pp2 zero3")
def labels_that_the_model_masks() -> Any:
    class Net(PlainNet):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            size = y.shape[0] * y.shape[1]
            wanted = y.clone().view(size)
            wanted[wanted == PAD] = -100
            return F.cross_entropy(super().forward(x).view(size, -1), wanted)

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            return self.net(batch["x"], batch["y"])

    return Module(Net()), rows()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(mixed.transpose(1, 2).flatten(2))


@CASES.add(equal="pp2 zero3", refused={"cp2": r"different number of labels.*ignore_index=.*LP309"})
def padding_that_comes_after_the_first_batch() -> Any:
    """The declared labels leave out none of it: the first batch cannot tell that."""

    class Module(PlainModule):
        batch = BatchLayout(labels="y", sequence_dims={"x": 1, "y": 1, "mask": 1})

        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"]).flatten(0, 1)
            return F.cross_entropy(logits, batch["y"].flatten(), ignore_index=PAD)

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="net.blocks", batch=self.batch, positions={})

    net = PlainNet()
    net.blocks = nn.ModuleList(_Attention() for _ in range(4))
    samples = rows()
    for sample in samples[:8]:
        sample |= {name: sample[name].clamp(min=PAD + 1) for name in ("x", "y")}
    return Module(net), samples


@CASES.add(refused={"pp2 zero3": r"mean over a different number of labels.*loss_weight.*LP309"})
def a_mask_that_depends_on_a_value() -> Any:
    def labels(batch: Any) -> Tensor:
        made = batch["y"].clone()
        if (made == PAD).any():
            made[made == PAD] = -100
        return made

    return of_labels(labels)


@CASES.add(refused={"pp2 zero3": r"(?s)neither the mean over the samples.*LP309"})
def rows_that_count_alike_by_chance() -> Any:
    """The samples that are looked at first: others tell."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            losses = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none")
            counts = y != PAD
            return losses.mean() if counts.all() else (losses * counts).sum() / counts.sum()

    samples = [(row["x"], row["y"]) for row in rows()]
    for first in range(0, len(samples), 8):
        samples[first : first + 8 : 7] = [samples[first]] * 2
    return Module(), samples


@CASES.add(refused={"pp2 zero3": r"(?s)draw them in the dataset or collate_fn instead.*LP309"})
def labels_that_are_drawn() -> Any:
    def labels(batch: Any) -> Tensor:
        hidden = torch.rand(batch["y"].shape, device=batch["y"].device) < 0.6
        return batch["y"].masked_fill(hidden, -100)

    return of_labels(labels)


@CASES.add(refused={"pp2 zero3": r"(?s)in the first step the loss is the mean over the.*LP309"})
def labels_masked_by_a_schedule() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            wanted = batch["y"].masked_fill(batch["y"] % (3 + self.global_step) == 0, -100)
            return F.cross_entropy(self.net(batch["x"]).flatten(0, 1), wanted.flatten())

    return Module(), rows()


def with_term(term: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    """A module whose loss is a mean over labels and a term that its value does not show."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"])
            wanted = batch["y"].masked_fill(batch["y"] == PAD, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            loss += 1e-6 * term(self.net, logits, (wanted != -100).to(loss))
            return loss / 2

    return Module(), rows()


@CASES.add(refused={"pp2 zero1": r"(?s)neither the mean over the samples.*LP309"})
def a_small_term_over_all_tokens() -> Any:
    return with_term(lambda net, logits, counts: logits.square().mean())


@CASES.add(refused={"pp2 zero1": r"(?s)neither the mean over the samples.*LP309"})
def a_small_term_in_a_stack() -> Any:
    def term(net: nn.Module, logits: Tensor, counts: Tensor) -> Tensor:
        each = logits.square()
        return torch.stack([(each.sum(-1) * counts).sum() / counts.sum(), each.mean()]).sum()

    return with_term(term)


@CASES.add(equal="pp2 zero1")
def a_small_term_over_the_same_labels() -> Any:
    def term(net: nn.Module, logits: Tensor, counts: Tensor) -> Tensor:
        return (logits.logsumexp(-1).square() * counts).sum() / counts.sum()

    return with_term(term)


@CASES.add(equal="zero1")
def a_small_term_of_weights() -> Any:
    return with_term(lambda net, logits, counts: sum(p.square().sum() for p in net.parameters()))


@CASES.add(equal="pp2", batch_size=64, strategy={"num_microbatches": 2})
def chosen_samples_of_which_a_few_samples_have_none() -> Any:
    """Every micro-batch has as many; the first eight samples, which the first look takes as a part,
    have none.
    """

    class Module(PlainModule):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            losses = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), reduction="none")
            return losses.view(y.shape).mean(1)[15::16].mean()

    return Module(), token_pairs(128)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equals_one_process_or_is_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
