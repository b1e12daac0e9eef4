"""Losses that are not the mean over the samples."""

import os
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout
from tests.distributed.user_code.test_batches import per_sample, stack, Undeclared
from tests.support.models.plain_language_model import NormalizedNet, PlainModule, token_pairs
from tests.support.ranks.api import run_ranks
from tests.support.user_code import _train_rank, Cases

CASES = Cases(__name__)


def ragged(samples: Any) -> Any:
    """Pad to the longest: inputs with 0, labels with -100."""
    size = max(len(a) for a, _ in samples)
    pad = lambda row, value: F.pad(row, (0, size - len(row)), value=value)  # noqa: E731
    x, y = [pad(a, 0) for a, _ in samples], [pad(b, -100) for _, b in samples]
    return torch.stack(x), torch.stack(y)


def unequal_pairs() -> list[Any]:
    return [(a[: 6 + 2 * (i % 4)], b[: 6 + 2 * (i % 4)]) for i, (a, b) in enumerate(token_pairs())]


def of_loss(loss: Any, collate: Any = None, layout: BatchLayout | None = None) -> Any:
    """A module whose plan declares no labels, with a loss of (module, x, y)."""

    class Module(PlainModule):
        batch = layout or BatchLayout()
        lr = 0.05

        def loss(self, batch: Any) -> Tensor:
            return loss(self, *batch)

    return Module(), (unequal_pairs() if collate else token_pairs()), collate or stack


@CASES.add(equal="pp2 zero3")
def padded_labels_that_nobody_declared() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module.net(x).flatten(0, 1), y.flatten())

    return of_loss(loss, ragged)


@CASES.add(equal="pp2 zero3")
def labels_without_padding_at_first() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module.net(x).flatten(0, 1), y.flatten())

    module, _, _ = of_loss(loss)
    pairs = [(a, b.clone()) for a, b in token_pairs()]
    for i, (_, labels) in enumerate(pairs[8:]):
        labels[: i % 5] = -100
    return module, pairs


@CASES.add(equal="pp2 zero3")
def sum_over_samples() -> Any:
    return of_loss(lambda module, x, y: per_sample(module, x, y).sum() / 20)


@CASES.add(equal="pp2 zero3")
def sum_of_sequence_means_with_padding() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(module.net(x).transpose(1, 2), y, reduction="none")
        return (losses.sum(1) / (y != -100).sum(1)).sum() / 20

    return of_loss(loss, ragged)


@CASES.add(equal="pp2 zero3")
def labels_declared_but_the_loss_is_a_mean_of_sequence_means() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(module.net(x).transpose(1, 2), y, reduction="none")
        return (losses.sum(1) / (y != -100).sum(1)).mean()

    return of_loss(loss, ragged, PlainModule.batch)


@CASES.add(equal="pp2 zero3")
def ignored_label_of_a_criterion() -> Any:
    class Module(Undeclared):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(ignore_index=7)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return self.criterion(self.net(x).flatten(0, 1), y.flatten())

    pairs = [(a, b % 9) for a, b in token_pairs()]
    return Module(), pairs


@CASES.add(equal="pp2 zero3")
def mean_over_a_mask() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            losses = F.cross_entropy(
                self.net(batch["x"]).transpose(1, 2), batch["y"], reduction="none"
            )
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

    pairs = token_pairs()
    masks = torch.rand(len(pairs), 12) > 0.3
    return Module(), [{"x": a, "y": b, "mask": m} for (a, b), m in zip(pairs, masks, strict=True)]


@CASES.add(equal="pp2 zero3")
def weights_of_a_criterion_for_classes() -> Any:
    class Module(Undeclared):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3, 64))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return self.criterion(self.net(x).flatten(0, 1), y.flatten())

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def smoothed_labels() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module.net(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)

    return of_loss(loss, ragged)


def two_kinds(layout: BatchLayout) -> Any:
    class Module(PlainModule):
        batch = layout

        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"])
            tokens = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
            return tokens + F.cross_entropy(logits[:, 0, :2], batch["order"])

    pairs = [(a, b.clone()) for a, b in token_pairs()]
    for i, (_, labels) in enumerate(pairs):
        labels[: i % 7] = -100
    return Module(), [{"x": a, "y": b, "order": i % 2} for i, (a, b) in enumerate(pairs)]


@CASES.add(
    equal="pp2_one_microbatch", refused={"pp2 zero3": r"(?s)loss_weight=.*Otherwise use (num|data)"}
)
def two_kinds_of_labels() -> Any:
    return two_kinds(BatchLayout())


@CASES.add(
    equal="pp2_one_microbatch", refused={"pp2 zero3": "write:\n  - If samples.*in-batch negatives"}
)
def in_batch_negatives() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            x, _ = batch
            z = F.normalize(self.net(x).mean(1), dim=1)
            own = torch.arange(len(z), device=z.device)
            return F.cross_entropy(z @ z.roll(1, 1).T / 0.1, own)

    return Module(), token_pairs()


@CASES.add(
    equal="zero0 pp2_one_microbatch",
    large="zero3",
    refused={"pp2": "(?s)neither the mean.*write:\n  - If samples.*and use one micro-batch"},
)
def in_batch_negatives_gathered() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(loss_weight="samples")

        def loss(self, batch: Any) -> Tensor:
            x, _ = batch
            z = F.normalize(self.net(x).mean(1), dim=1)
            keys = self.all_gather(z, sync_grads=True).reshape(-1, z.shape[1])
            ranks = self.trainer.strategy.mesh.sizes.data if self.trainer.world_size > 1 else 1
            first = self.trainer.global_rank * len(z) if ranks > 1 else 0
            own = torch.arange(len(z), device=z.device) + first
            return F.cross_entropy(z @ keys.roll(1, 1).T / 0.1, own)

    return Module(), token_pairs()


def normalized(layout: BatchLayout) -> Any:
    class Module(PlainModule):
        batch = layout

        def __init__(self) -> None:
            super().__init__(NormalizedNet())

        def parallel_plan(self) -> Any:
            return replace(super().parallel_plan(), first=("net.statistics",))

    return Module(), token_pairs()


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2": "num_microbatches=1", "zero3": "sync_batchnorm=True"},
)
def batch_norm() -> Any:
    return normalized(PlainModule.batch)


@CASES.add(equal="zero3 zero0", trainer={"sync_batchnorm": True})
def synchronized_batch_norm() -> Any:
    return normalized(PlainModule.batch)


@CASES.add()
def batch_norm_of_parts() -> Any:
    return normalized(replace(PlainModule.batch, local_statistics=True))


def by_hand(module: Any, x: Tensor, y: Tensor) -> Tensor:
    losses, counts = F.cross_entropy(module.net(x).transpose(1, 2), y, reduction="none"), y != -100
    return (losses * counts).sum() / counts.sum()


def shortened(counts: Any) -> list[Any]:
    """Samples of which `counts` labels count, by their number."""
    pairs = [(a, b.clone()) for a, b in token_pairs()]
    for i, (_, labels) in enumerate(pairs):
        labels[counts(i) :] = -100
    return pairs


@CASES.add(equal="zero1 pp2", large="zero3 tp2")
def a_value_logged_with_the_number_that_it_is_a_mean_of() -> Any:
    class Module(PlainModule):
        batch = BatchLayout(loss_weight="samples")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, counts = self.net(batch[0]), batch[0] % 3 == 0
            found = (logits.logsumexp(-1) * counts).sum() / counts.sum()
            self.log("loss", found, batch_size=int(counts.sum()), sync_dist=True)
            return logits.square().mean()

    return Module(), token_pairs()


@CASES.add(equal="zero1 pp2")
def a_value_logged_with_a_number_that_one_replica_has_samples_too() -> Any:
    """Replica 0 has one counted token in each sample, hence as many as samples; replica 1 two."""
    module, samples = a_value_logged_with_the_number_that_it_is_a_mean_of()
    for number, (tokens, _) in enumerate(samples):
        tokens[tokens % 3 == 0] = 1
        tokens[: 1 + number % 2] = 3
    return module, samples


@CASES.add(equal="zero1", trainer={"precision": "bf16-mixed"}, tolerance=2e-3)
def counts_that_differ_by_one_at_first_in_bfloat16() -> Any:
    module, *_ = of_loss(by_hand)
    return module, shortened(lambda i: 12 - i % 4 // 2 if i < 8 else 2 + i * 5 % 11)


@CASES.add(equal="zero1 zero3")
def counts_that_differ_between_replicas_only() -> Any:
    module, *_ = of_loss(by_hand)
    return module, shortened(lambda i: (12, 3)[i % 2])


@CASES.add(equal="zero1", batch_size=2)
def a_masked_mean_with_one_row_on_each_replica() -> Any:
    module, *_ = of_loss(by_hand)
    return module, shortened(lambda i: 2 + i * 5 % 11)


@CASES.add(refused={"zero1": "compared with each other"}, batch_size=2)
def negatives_in_a_batch_of_one_row_on_each_replica() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(module.net(x).mean(1), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z), device=z.device))

    return of_loss(loss)


@CASES.add(equal="zero1 pp2")
def a_mask_made_of_lengths_that_tie_at_first() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            counts = torch.arange(12) >= batch["prompt"][:, None]
            logits = self.net(batch["x"]).transpose(1, 2)
            losses = F.cross_entropy(logits, batch["y"], reduction="none")
            return (losses * counts).sum() / counts.sum()

    pairs = enumerate(token_pairs())
    return Module(), [{"x": a, "y": b, "prompt": 4 if i < 8 else i * 5 % 11} for i, (a, b) in pairs]


@CASES.add(equal="zero1", batch_size=2)
def rows_of_unequal_lengths_on_replicas_without_padding() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module.net(x).flatten(0, 1), y.flatten())

    return of_loss(loss, ragged)


@CASES.add(refused={"pp2 zero1": "neither the mean"}, strategy={"verify": False})
def a_mean_over_tokens_that_are_drawn() -> Any:
    """Of a micro-batch of one sample none may be drawn, so that its loss is not a number."""

    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        drawn = torch.rand(x.shape) < 0.3
        return F.cross_entropy(module.net(x.where(~drawn, 0))[drawn], y[drawn])

    return of_loss(loss)


def later(loss: Any) -> Any:
    """A loss that has another form from the third step on, which the module counts itself."""

    def of_step(module: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = per_sample(module, x, y)
        return loss(losses) if module.begun > 2 else losses.mean()

    def count(*_: Any) -> None:
        module.begun += 1

    module, *rest = of_loss(of_step)
    module.begun, module.on_train_batch_start = 0, count
    return module, *rest


@CASES.add(equal="pp2 zero1")
def a_term_that_begins_later() -> Any:
    return later(lambda losses: losses.mean() + 0.1 * losses.square().mean())


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2 zero3": "(?s)neither the mean.*calls topk.*Use (num|data).*changed in step 2"},
)
def hard_samples_from_the_third_step_on() -> Any:
    return later(lambda losses: losses.topk(len(losses) // 2 or 1).values.mean())


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2 zero1": "in step 2.*was the mean over the samples; now it is the sum"},
)
def a_sum_from_the_third_step_on() -> Any:
    return later(lambda losses: losses.sum() / 8)


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2 zero3": "(?s)neither the mean.*use (num|data).*No weight was changed"},
)
def confident_samples_from_the_third_step_on() -> Any:
    """No sample is confident before; the operations of the loss stay the same."""
    module, *rest = later(lambda _: None)

    def loss(batch: Any) -> Tensor:
        losses = per_sample(module, *batch)
        mask = (losses.detach() > (4.2 if module.begun > 2 else 99.0)).double()
        return losses.mean() + (losses * mask).sum() / mask.sum().clamp(min=1)

    module.loss = loss
    return module, *rest


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2": "selects some samples of a batch by topk.*Use num_microbatches=1"},
)
def hard_samples_above_a_threshold_or_the_hardest() -> Any:
    """Of the first batch all are hard."""
    module, *rest = later(lambda _: None)

    def loss(batch: Any) -> Tensor:
        losses = per_sample(module, *batch)
        hard = losses[losses > (4.2 if module.begun > 2 else 0.0)]
        return (hard if len(hard) > 2 else losses.topk(min(3, len(losses))).values).mean()

    module.loss = loss
    return module, *rest


@CASES.add(refused={"zero1": "neither the mean"})
def a_factor_that_is_zero_at_first() -> Any:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = per_sample(module, x, y)
        return losses.mean() + 0.2 * max(0, module.trainer.global_step - 1) * losses.max()

    return of_loss(loss)


def of_world(factor: Any) -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * factor(self)

    return Module(), token_pairs()


_OF_WORLD = r"training_step computes the loss.* from the number of processes .*all_gather"


@CASES.add(refused={"tp2 pp2 cp2": _OF_WORLD}, strategy={"verify": False})
def times_the_number_of_processes() -> Any:
    return of_world(lambda module: module.trainer.world_size)


@CASES.add(refused={"pp2": _OF_WORLD}, strategy={"verify": False})
def times_the_number_of_ranks() -> Any:
    return of_world(lambda _: dist.get_world_size() if dist.is_initialized() else 1)


@CASES.add(refused={"pp2": _OF_WORLD}, strategy={"verify": False})
def times_the_number_of_ranks_that_the_strategy_has() -> Any:
    return of_world(lambda module: getattr(module.trainer.strategy, "world_size", 1))


@CASES.add(refused={"tp2": _OF_WORLD}, strategy={"verify": False})
def times_the_size_of_the_group_of_all_ranks() -> Any:
    return of_world(lambda _: dist.group.WORLD.size() if dist.is_initialized() else 1)


@CASES.add(refused={"tp2": _OF_WORLD}, strategy={"verify": False})
def times_the_number_of_processes_in_the_environment() -> Any:
    return of_world(lambda _: int(os.environ["WORLD_SIZE"]) if dist.is_initialized() else 1)


_OF_RANK = r"training_step computes the loss from the rank .*test_losses.*Do not use the rank"


@CASES.add(refused={"tp2 pp2_one_microbatch": _OF_RANK}, strategy={"verify": False})
def a_loss_that_rank_zero_doubles() -> Any:
    return of_world(lambda _: 1 if dist.is_initialized() and dist.get_rank() else 2)


@CASES.add(refused={"tp2": _OF_RANK}, strategy={"verify": False})
def a_loss_that_lightnings_rank_zero_doubles() -> Any:
    return of_world(lambda module: 2 if module.trainer.is_global_zero else 1)


@CASES.add(equal="tp2 pp2", strategy={"verify": False})
def a_step_that_asks_for_its_rank() -> Any:
    return of_world(lambda module: 2 if module.global_rank == 0 or module.trainer else 1)


@CASES.add(equal="tp2 pp2", strategy={"verify": False})
def times_the_number_of_replicas() -> Any:
    """As the refusal advises."""
    return of_world(lambda module: module.all_gather(torch.ones(1, device=module.device)).numel())


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)


def _warned(rank: int, world: int, case: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train_rank(rank, world, __name__, case, "zero1")
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("case", ["times_the_number_of_processes", "a_loss_that_rank_zero_doubles"])
def test_what_replicas_compute_with_their_number_is_named_where_nothing_is_proved(
    case: str,
) -> None:
    told = " ".join(run_ranks(_warned, 2, case, timeout=180)[0])
    assert re.search(r"the loss.* is not known; verify=\"first_step\"", told)


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_statistics_of_parts_are_accepted(layout: str) -> None:
    """It trains on, with numbers that are not those of one process."""
    with pytest.raises(AssertionError, match="not close"):
        CASES.check("batch_norm_of_parts", layout, None)
