"""Losses that take another branch by their own value, or by the samples of a batch, and terms that
are 0 in the first step.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distributed.user_code.test_batches import per_sample, Undeclared
from tests.support.models.plain_language_model import token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


@CASES.add(equal="pp2_one_microbatch", refused={"pp2": "neither the mean"})
def a_branch_by_the_loss_of_a_micro_batch() -> Any:
    """The later micro-batches have losses that are above the limit from the third step on."""

    class Module(Undeclared):
        limit = 99.0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.limit = 5.5 if batch_idx > 1 else 99.0

        def loss(self, batch: Any) -> Tensor:
            x, y, factor = batch
            loss = (per_sample(self, x, y) * factor).mean()
            return 0.1 * loss if loss > self.limit else loss

    return Module(), [
        (a, b, torch.tensor(1.0 + (i % 8 > 3))) for i, (a, b) in enumerate(token_pairs())
    ]


@CASES.add(equal="pp2 zero1")
def a_choice_for_each_sample() -> Any:
    """Each sample takes its own branch, so parts add up."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            losses = per_sample(self, *batch)
            return torch.where(losses.detach() < 4.2, losses, 0.1 * losses).mean()

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero1")
def a_sum_over_samples_of_a_kind_that_one_replica_has() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            x, y, kind = batch
            losses = per_sample(self, x, y)
            loss = losses.mean()
            return loss + (losses.square() * kind).sum() / len(kind) if kind.any() else loss

    pairs = enumerate(token_pairs())
    return Module(), [(a, b, torch.tensor(i > 15 and i % 2 == 0)) for i, (a, b) in pairs]


@CASES.add(equal="pp2 zero1")
def a_mean_over_labels_that_one_part_may_not_have() -> Any:
    """There all rules fit the samples that are looked at, and only some fit those before."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            x, y, counts = batch
            losses = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none")
            mask = (torch.arange(12) < counts[:, None]).double()
            count = mask.sum()
            return torch.where(count > 0, (losses * mask).sum() / count.clamp(min=1), 0.0)

    # Of the last batch, one replica and one micro-batch have no label that counts.
    pairs = enumerate(token_pairs())
    return Module(), [
        (a, b, torch.tensor(0 if i > 15 and i % 2 else 3 + i % 4)) for i, (a, b) in pairs
    ]


def with_teacher(ignores: Callable[[int], bool]) -> Any:
    """A module with the distance to an average of its weights, which is 0 in the first step."""

    class Module(Undeclared):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            logits = self.net(x)
            with torch.no_grad():
                wanted = self.teacher(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
            return loss + F.mse_loss(logits, wanted)

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for ours, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    ours.lerp_(own, 0.1)

    masks = [torch.arange(12) < (i % 4 if ignores(i) else 0) for i in range(40)]
    pairs = zip(token_pairs(), masks, strict=False)
    return Module(), [(a, b.masked_fill(mask, -100)) for (a, b), mask in pairs]


@CASES.add(refused={"pp2 zero1": r"(?s)neither the mean.*LP309"})
def a_distance_to_an_average_beside_labels_that_are_left_out() -> Any:
    return with_teacher(lambda _: True)


@CASES.add(equal="pp2 zero1")
def a_distance_to_an_average_beside_labels_that_all_count() -> Any:
    return with_teacher(lambda _: False)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
