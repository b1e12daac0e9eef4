"""Buffers that a step changes from its samples."""

from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn.utils.parametrizations import spectral_norm

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


class Counting(nn.Module):
    """Counts the tokens that it gets, and keeps a running mean of them."""

    counts: Tensor
    mean: Tensor

    def __init__(self, *, keeps_mean: bool) -> None:
        super().__init__()
        self.keeps_mean = keeps_mean
        self.register_buffer("counts", torch.zeros(8, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: Tensor) -> None:
        self.counts += torch.bincount(tokens.flatten() % 8, minlength=8)
        self.steps += 1
        if self.keeps_mean:
            self.mean.lerp_(tokens.to(self.mean.dtype).mean(), 0.1)


def counting(*, keeps_mean: bool) -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting(keeps_mean=keeps_mean)

        def loss(self, batch: Any) -> Tensor:
            self.counting(batch[0])
            return super().loss(batch)

        def on_train_batch_end(self, *_: Any) -> None:
            counts = self.counting.counts
            rate = float((counts * torch.arange(8)).sum() / counts.sum()) / 50
            self.trainer.optimizers[0].param_groups[0]["lr"] = rate + float(self.counting.mean)

    return Module(), token_pairs()


@CASES.add(
    equal="tp2 pp2 zero1pp2",
    large="zero1 zero3 zero1tp2 pp2_interleaved pp2_one_microbatch",
    strategy={"verify": False},
)
def a_buffer_that_counts_the_samples() -> Any:
    return counting(keeps_mean=False)


@CASES.add(equal="zero1")
def a_buffer_that_counts_the_samples_proved() -> Any:
    return counting(keeps_mean=False)


@CASES.add(
    equal="tp2 pp2_one_microbatch",
    refused={
        "zero1": r"(?s)the buffer counting\.mean from its samples.*total \+= x.*local_statistics",
        "pp2": r"(?s)the buffer counting\.mean .*each micro-batch.*Or use num_microbatches=1",
    },
    strategy={"verify": False},
)
def a_buffer_with_a_running_mean() -> Any:
    return counting(keeps_mean=True)


class CountingNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].counting = Counting(keeps_mean=False)
        self.blocks[0].register_forward_pre_hook(count_hidden)


def count_hidden(block: Any, args: Any) -> None:
    block.counting((args[0].detach().abs().sum(-1) * 100).long())


@CASES.add(
    refused={"tp2": r"(?s)counting\.counts.*sequence_parallel=False"}, strategy={"verify": False}
)
def tokens_that_a_block_counts() -> Any:
    return PlainModule(CountingNet()), token_pairs()


@CASES.add(
    equal="tp2_whole_sequence pp2_interleaved",
    large="zero1 pp2 zero1pp2 pp2_one_microbatch",
    strategy={"verify": False},
)
def whole_tokens_that_a_block_counts() -> Any:
    """As the refusal advises."""
    return PlainModule(CountingNet()), token_pairs()


class ScaledNet(PlainNet):
    """Each block makes the buffer of its scales in the first step, as causal masks often are."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("scale", None, persistent=False)
            block.register_forward_hook(scale_hidden)


def scale_hidden(block: Any, _: Any, hidden: Tensor) -> Tensor:
    if block.scale is None:
        block.scale = torch.linspace(0.5, 1.5, hidden.shape[-1]).to(hidden)
    return hidden * block.scale


@CASES.add(equal="tp2 zero3 pp2", large="zero1 zero1pp2 pp2_interleaved")
def a_buffer_that_is_made_in_the_first_step() -> Any:
    return PlainModule(ScaledNet()), token_pairs()


def keeping(keep: Any) -> Any:
    """A module that does something with its buffers before its loss."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            for name, value in {
                "mask": torch.full((4, 4), float("-inf")).triu(1),
                "nans": torch.full((2,), float("nan")),
                "cache": torch.empty(0),
                "late": None,
                "first": torch.zeros(2),
                "largest": torch.zeros(()),
                "seen": torch.zeros(64, dtype=torch.bool),
            }.items():
                self.register_buffer(name, value, persistent=False)

        def loss(self, batch: Any) -> Tensor:
            keep(self, batch[0])
            return super().loss(batch)

    return Module(), token_pairs()


@CASES.add(equal="zero1", large="tp2", strategy={"verify": False})
def buffers_with_infinities_that_nothing_changes() -> Any:
    return keeping(lambda module, x: module.mask[: x.shape[1], : x.shape[1]])


def grow(module: Any, x: Tensor) -> None:
    if module.cache.numel() < x.shape[1]:
        module.cache = torch.arange(x.shape[1], device=x.device).cos().to(module.cache.dtype)
        module.late = torch.full((x.shape[1],), float("-inf"), device=x.device)
        module.first = None


@CASES.add(equal="zero1", large="tp2", strategy={"verify": False})
def buffers_that_grow_appear_or_vanish() -> Any:
    return keeping(grow)


def note_largest(module: Any, x: Tensor) -> None:
    module.largest = torch.maximum(module.largest, x.max().to(module.largest.dtype))


@CASES.add(
    equal="tp2 pp2",
    large="pp2_interleaved pp2_one_microbatch",
    refused={"zero1 zero1pp2": r"the buffer largest from its samples"},
    strategy={"verify": False},
)
def a_running_maximum() -> Any:
    return keeping(note_largest)


@CASES.add(refused={"zero1": r"the buffer largest from its samples"}, strategy={"verify": False})
def a_running_maximum_of_samples_that_grow() -> Any:
    """So that parts, one after the other, end as the whole does, as those of a sum do."""
    tokens = torch.arange(32)[:, None].expand(32, 12).contiguous()
    return keeping(note_largest)[0], [(row, row) for row in tokens]


@CASES.add(
    equal="pp2",
    refused={"zero1 zero1pp2": r"the buffer largest from its samples"},
    strategy={"verify": False},
)
def a_running_maximum_that_the_first_samples_have() -> Any:
    """So that the first part changes it as the whole does, as it does to a count of steps."""
    tokens = torch.arange(32)[:, None].expand(32, 12).contiguous().flip(0)
    return keeping(note_largest)[0], [(row, row) for row in tokens]


def count_rare(module: Any, x: Tensor) -> None:
    module.first = module.first + (x > 60).sum()


@CASES.add(equal="zero1", strategy={"verify": False})
def a_sum_to_which_the_last_samples_add_nothing() -> Any:
    tokens = torch.arange(96, 64, -1)[:, None].expand(32, 12).remainder(64).flip(1).contiguous()
    tokens[::4] = 63
    return keeping(count_rare)[0], [(row, row) for row in tokens]


@CASES.add(equal="zero1 pp2", strategy={"verify": False})
def a_flag_that_the_first_step_sets() -> Any:
    def set_flag(module: Any, x: Tensor) -> None:
        module.largest = torch.ones_like(module.largest)

    return keeping(set_flag)


def count_longer(module: Any, x: Tensor) -> None:
    if module.global_step == 2:
        module.first = torch.zeros(3, device=x.device)
    module.first = module.first + x.sum()


@CASES.add(
    refused={"zero1": r"changes the shape of the buffer first from \(2,\) to \(3,\)"},
    strategy={"verify": False},
)
def a_sum_that_gets_another_shape() -> Any:
    return keeping(count_longer)


def note_seen(module: Any, x: Tensor) -> None:
    module.seen = module.seen | (torch.bincount(x.flatten(), minlength=64) > 0)


@CASES.add(
    equal="tp2", refused={"zero1": r"the buffer seen from its samples"}, strategy={"verify": False}
)
def flags_of_tokens_that_were_seen() -> Any:
    return keeping(note_seen)


class Tracking(PlainModule):
    """Keeps numbers of its steps and of their losses, in the module and in one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = nn.Module()
        for part in (self, self.tracker):
            part.register_buffer("steps", torch.zeros(()))
            part.register_buffer("total", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        factor = 0.3 + self.steps / 10  # a warm-up by a count of steps
        loss = super().loss(batch) * factor
        with torch.no_grad():
            for part in (self, self.tracker):
                part.steps += 1
                part.total += loss.detach() * len(batch[0])
        return loss


@CASES.add(
    equal="pp2 zero1",
    large="tp2 pp2_interleaved pp2_one_microbatch zero1pp2",
    strategy={"verify": False},
)
def numbers_of_steps_and_losses() -> Any:
    return Tracking(), token_pairs()


class AveragedLoss(Tracking):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            self.tracker.total.lerp_(loss, 0.1)
        return loss


@CASES.add(
    equal="pp2_one_microbatch",
    refused={
        "pp2 pp2_interleaved": r"(?s)the buffer tracker\.total .*num_microbatches=1",
        "zero1pp2": r"the buffer tracker\.total from its samples",
    },
    strategy={"verify": False},
)
def a_running_mean_of_the_loss() -> Any:
    return AveragedLoss(), token_pairs()


class CountingSteps(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].counting = Counting(keeps_mean=False)
        self.blocks[0].register_forward_pre_hook(count_calls)


def count_calls(block: Any, _: Any) -> None:
    block.counting.steps += 1


@CASES.add(equal="pp2", large="tp2 zero1 pp2_interleaved zero1pp2", strategy={"verify": False})
def steps_that_a_block_counts() -> Any:
    return PlainModule(CountingSteps()), token_pairs()


@CASES.add(equal="pp2 pp2_interleaved", large="zero1 zero3 zero1pp2", strategy={"verify": False})
def vectors_of_spectral_norms() -> Any:
    """Each forward takes one step of a power iteration, whatever its samples are."""
    module = PlainModule()
    for block in module.net.blocks:
        spectral_norm(block.mlp.up)
    return module, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
