"""What the proof of the first step ends, and the same module as its verdict advises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from tests.distributed.user_code.test_first_step_proof import GlobalNorm, WeightedByList
from tests.support.cures import Cures
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.ranks.api import run_ranks
from tests.support.user_code import train_case

CURES = Cures(__name__)
CASES = CURES.cases


@CASES.add(
    refused={"pp2": r"(?s)To try: num_microbatches=1\. If this removes the.*explain LP801"},
    equal="pp2_one_microbatch",
)
def weights_that_no_entry_gives() -> Any:
    return WeightedByList(), token_pairs()


@CASES.add(
    refused={"tp2": r"(?s)To try: sequence_parallel=False\. If this removes.*explain LP801"},
    equal="tp2_whole_sequence",
)
def a_pool_over_tokens() -> Any:
    class Pooling(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h + h.mean(1, keepdim=True)))

    return PlainModule(Pooling()), token_pairs()


@CURES.add(
    "LP801",
    r"gives net\.norm the style 'replicated'.*a tensor-parallel style uses a shard",
    "tp2",
    styles={"net.norm": "sequence_parallel"},
)
def a_style_that_sums_no_gradient(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def parallel_plan(self) -> Any:
            plan = super().parallel_plan()
            return replace(plan, tensor={**plan.tensor, "net.norm": "replicated"})

    return Module()


@CURES.add("LP801", r"To try: remove hooks on weights and modules \(register_hook", "zero3")
def a_hook_that_sees_a_part_of_the_batch(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_start(self) -> None:
            if not cured:
                self.net.head.register_full_backward_hook(_divided_by_its_largest_entry)

    return Module()


def _divided_by_its_largest_entry(_: nn.Module, grads: tuple[Tensor], __: Any) -> tuple[Tensor]:
    return (grads[0] / grads[0].abs().max(),)


@CURES.add("LP919", r"register_hook.*hook would never be called, .* Change p\.grad", "zero3")
def a_hook_made_in_the_run(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_start(self) -> None:
            if not cured:
                self.net.head.weight.register_hook(lambda grad: 0.1 * grad)

        def on_after_backward(self) -> None:
            if cured:
                self.net.head.weight.grad.mul_(0.1)

    return Module()


@CURES.add("LP801", "None of them may depend on the number of processes")
def a_learning_rate_by_the_size_of_a_group(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            ranks = 1
            if dist.is_initialized() and not cured:
                ranks = len(dist.get_process_group_ranks(dist.group.WORLD))
            return torch.optim.SGD(self.parameters(), lr=0.1 * ranks)

    return Module()


@CURES.add("LP801", r"torch\.optim\.SGD instead of GlobalNorm.*that updates each entry")
def an_optimizer_that_divides_by_a_norm(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            if cured:
                return torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer = GlobalNorm(self.parameters(), lr=0.1)
            optimizer.looks_across = "entry"
            return optimizer

    return Module()


@CURES.add("LP801", r"To try: remove Module\.on_before_optimizer_step, .*this removes", "zero3")
def a_hook_that_scales_parts_of_gradients(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in () if cured else self.parameters():
                part = local_part(parameter.grad)
                if part.numel():
                    part.div_(part.abs().max())

    return Module()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)


def test_a_run_trains_on_in_spite_of_a_difference_if_nothing_is_proved() -> None:
    for result in run_ranks(_train_unproved, 2, timeout=120):
        assert "refused" not in result
        assert len(result["losses"]) == 4


def _train_unproved(rank: int, world: int) -> Any:
    case = replace(CASES.cases["weights_that_no_entry_gives"], strategy={"verify": False})
    return train_case(case, "pp2", rank, world)
