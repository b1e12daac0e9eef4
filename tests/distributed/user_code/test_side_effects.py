"""Blocks that leave something behind besides their output, and modules defined out of order."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


@CASES.add(equal="zero3")
def auxiliary_loss_on_an_attribute() -> Any:
    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            self.aux = out.square().mean()
            return out

    class Module(PlainModule):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) + 0.1 * sum(b.aux for b in self.net.blocks)

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="net.blocks", batch=self.batch)

    net = PlainNet()
    net.blocks = nn.ModuleList(Block(block) for block in net.blocks)
    return Module(net), token_pairs()


@CASES.add(equal="pp2")
def auxiliary_loss_that_is_carried() -> Any:
    module, samples = auxiliary_loss_on_an_attribute()
    plan = module.parallel_plan()
    module.parallel_plan = lambda: replace(plan, carried=("aux",))
    return module, samples


@CASES.add(equal="pp2 tp2", large="zero3 pp2_interleaved")
def settings_of_blocks_that_a_hook_changes() -> Any:
    """On every rank alike, so that a stub of a block has what the block has."""

    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.rate, self.history = inner, 1.0, list[float]()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.rate * self.inner(x)
            return out

    class Module(PlainModule):
        def on_train_batch_start(self, *_: Any) -> None:
            for block in self.net.blocks:
                block.rate *= 0.9
                block.history.append(block.rate)

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="net.blocks", batch=self.batch)

    net = PlainNet()
    net.blocks = nn.ModuleList(Block(block) for block in net.blocks)
    return Module(net), token_pairs()


@CASES.add(equal="zero3", refused={"pp2": r"net.head is used after the blocks.*last="})
def head_defined_before_the_blocks() -> Any:
    class Net(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            children = self._modules
            self._modules = {n: children[n] for n in ("head", "emb", "blocks", "norm")}

    return PlainModule(Net()), token_pairs()


@CASES.add(equal="pp2")
def head_defined_before_the_blocks_and_declared() -> Any:
    module, samples = head_defined_before_the_blocks()
    plan = replace(module.parallel_plan(), last=("net.head",))
    module.parallel_plan = lambda: plan
    return module, samples


def with_styles(**changes: Any) -> Any:
    module = PlainModule()
    plan = module.parallel_plan()
    styles = {**plan.tensor, **{f"net.{k.replace('__', '.')}": v for k, v in changes.items()}}
    module.parallel_plan = lambda: replace(plan, tensor=styles)  # type: ignore[method-assign]
    return module, token_pairs()


@CASES.add(
    refused={"tp2 tp2_whole_sequence": "net.head is 'colwise', but no module that contains it"}
)
def colwise_behind_a_gathered_norm() -> Any:
    return with_styles(norm="sequence_gather_output", head="colwise")


@CASES.add(equal="tp2 tp2_whole_sequence")
def colwise_gathered_behind_a_gathered_norm() -> Any:
    return with_styles(norm="sequence_parallel", head="colwise_gather_output")


@CASES.add(refused={"tp2": r"net\.head.* combines a plain tensor with a weight"})
def weights_read_by_the_module_around() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias)

    net = PlainNet()
    net.head = Tied()  # type: ignore[assignment]
    module = PlainModule(net)
    plan = module.parallel_plan()
    styles = {k: v for k, v in plan.tensor.items() if k != "net.head"}
    styles |= {"net.norm": "sequence_gather_output", "net.head.inner": "colwise_gather_output"}
    module.parallel_plan = lambda: replace(plan, tensor=styles)  # type: ignore[method-assign]
    return module, token_pairs()


DRAWS = random.Random()


@CASES.add(equal="zero1 pp2_one_microbatch", large="tp2")
def a_generator_beside_the_module() -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * DRAWS.random()

    DRAWS.seed(3)
    return Module(), token_pairs()


@CASES.add(equal="zero3 pp2")
def state_that_every_step_moves_on() -> Any:
    """Power iterations and a count of steps, whatever the samples; and a mean of losses."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.spectral_norm(self.net.head)
            self.steps, self.mean = 0, torch.zeros(())

        def loss(self, batch: Any) -> Any:
            self.steps += 1
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            loss = loss + logits.square().mean() * min(1, self.steps / 3)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            return loss

    return Module(), token_pairs()


def moved_on(make: Any) -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            make(self)

        def loss(self, batch: Any) -> Any:
            loss = super().loss(batch)
            centered = loss * (1 + self.mean)
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return centered

    return Module(), token_pairs()


@CASES.add(refused={"zero3": "the buffer mean from its samples"})
def state_that_samples_move_on() -> Any:
    return moved_on(lambda module: module.register_buffer("mean", torch.zeros(())))


@CASES.add(refused={"zero3": "It is neither the mean over the .*, nor their sum"})
def state_in_an_attribute_that_samples_move_on() -> Any:
    return moved_on(lambda module: setattr(module, "mean", torch.zeros(())))


@CASES.add(equal="tp2 pp2")
def a_forward_in_a_hook() -> Any:
    class Module(PlainModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.net(batch[0])

    return Module(), token_pairs()


@CASES.add(
    equal="tp2 pp2_one_microbatch",
    large="zero3",
    refused={"pp2": "fails when it gets . of the . samples"},
)
def a_count_of_samples_in_the_batch() -> Any:
    class Module(PlainModule):
        def parallel_plan(self) -> ParallelPlan:
            return replace(super().parallel_plan(), batch=BatchLayout())

        def loss(self, batch: Any) -> Any:
            logits = self.net(batch["x"])
            assert len(logits) == batch["count"], "nodes are missing"
            return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    def collate(samples: Any) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return {"x": x, "y": y, "count": len(x)}

    return Module(), token_pairs(), collate


@CASES.add(equal="zero3 pp2_one_microbatch")
def a_part_that_every_second_step_adds_and_a_buffer_of_the_first() -> Any:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.9

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.tail, self.steps = nn.Sequential(), 0

        def loss(self, batch: Any) -> Any:
            if self.steps % 2 == 0:
                self.tail.append(Scale())
            if not hasattr(self, "warmth"):
                self.register_buffer("warmth", torch.ones(()))
            self.steps += 1
            self.warmth *= 0.9
            logits = self.tail(self.net(batch[0])) * self.warmth
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return Module(), token_pairs()


@CASES.add(
    equal="pp2", refused={"zero1 zero3": "down writes to its parameter .*down.weight, but this"}
)
def a_weight_of_length_one_that_its_forward_normalizes() -> Any:
    class Unit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = F.normalize(self.weight.data, dim=0)
            return super().forward(x)

    net = PlainNet()
    for block in net.blocks:
        block.mlp.down = Unit(48, 32)
        block.mlp.down.weight.data = F.normalize(block.mlp.down.weight.data, dim=0)
    return PlainModule(net), token_pairs()


@CASES.add(equal="zero0 zero1 zero3")
def a_temperature_that_the_forward_clamps() -> Any:
    class Head(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 64)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.temperature.clamp_(0.5, 0.999)
            return super().forward(x) * self.temperature

    net = PlainNet()
    net.head = Head()
    return PlainModule(net), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
