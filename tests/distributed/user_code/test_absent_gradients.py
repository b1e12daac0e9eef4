"""Parameters without a gradient: on some replicas, behind a detached stage, or everywhere.

AdamW decays a weight whose gradient is 0, and leaves one alone whose gradient is None.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__, blocks=4)
CHOSEN = 7  # first token of the samples that take the branch


def branching_samples() -> list[Any]:
    """Samples of which all take a branch, then those of one replica, none, and one of them."""
    samples = token_pairs()
    rules: list[Callable[[int], bool]] = [
        lambda _: True,
        lambda place: place % 2 == 0,
        lambda _: False,
        lambda place: place == 3,
    ]
    for number, (tokens, _) in enumerate(samples):
        step, place = divmod(number, 8)
        tokens[0] = CHOSEN if rules[step % 4](place) else CHOSEN + 1
    return samples


class Decayed(PlainModule):
    """Trained by AdamW with a large decay."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.5)


class Routed(PlainNet):
    """Some parts see the chosen samples only, and are not called without any."""

    routed: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 32))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] == CHOSEN).nonzero()[:, 0]
        h = self.emb(x)
        if len(chosen):
            h = h.index_add(0, chosen, self.tower(h[chosen]))
        for number, block in enumerate(self.blocks):
            if number not in self.routed:
                h = block(h)
            elif len(chosen):
                h = h.index_copy(0, chosen, block(h[chosen]))
        return self.head(self.norm(h))


def routed(*blocks: int, base: type[PlainModule] = Decayed) -> Any:
    net = Routed()
    net.routed = blocks
    return base(net), branching_samples()


@CASES.add(equal="zero0", large="zero1 zero2 zero3")
def tower_for_some_samples() -> Any:
    return routed()


@CASES.add(equal="zero3", large="zero0 zero2", trainer={"accumulate_grad_batches": 2})
def blocks_for_some_samples_with_accumulation() -> Any:
    return routed(0, 2, 3)


@CASES.add(equal="zero2", large="zero3", strategy={"offload_options": {}, "verify": False})
def blocks_for_some_samples_and_the_optimizer_on_the_host() -> Any:
    return routed(1, 3)


@CASES.add(equal="zero3", large="zero1")
def frozen_blocks_for_some_samples() -> Any:
    module, samples = routed(1, 2)
    module.net.blocks[:3].requires_grad_(False)
    return module, samples


@CASES.add(equal="zero1", large="zero3")
def hook_that_counts_gradients() -> Any:
    class Module(Decayed):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # A rate that depends on which gradients there are.
            held = sum(p.grad is not None for p in self.parameters())
            optimizer.param_groups[0]["lr"] = 1e-3 * held

    return routed(1, base=Module)


class Detached(PlainNet):
    """No gradient passes between two blocks in some steps."""

    is_detached: Callable[[int], bool] = staticmethod(lambda _: True)
    step = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for number, block in enumerate(self.blocks):
            h = block(h.detach() if number == 2 and self.is_detached(self.step) else h)
        return self.head(self.norm(h))


class Counted(Decayed):
    """Tells its net the number of the batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.step = batch_idx


@CASES.add(equal="pp2", large="tp2 tp2pp2 zero3")
def stages_detached() -> Any:
    return Counted(Detached()), token_pairs()


@CASES.add(equal="tp2pp2", large="pp2", strategy={"verify": False})
def stages_detached_from_the_second_step_on() -> Any:
    net = Detached()
    net.is_detached = bool
    return Counted(net), token_pairs()


@CASES.add(equal="pp2", strategy={"schedule": "zbv"})
def stages_detached_in_every_other_step() -> Any:
    net = Detached()
    net.is_detached = lambda step: step % 2 == 1
    return Counted(net), token_pairs()


@CASES.add(equal="tp2", large="pp2 tp2pp2 zero1tp2")
def first_blocks_without_gradients() -> Any:
    class Net(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            for number, block in enumerate(self.blocks):
                with torch.set_grad_enabled(number >= 2 and torch.is_grad_enabled()):
                    h = block(h)
            return self.head(self.norm(h))

    return Decayed(Net()), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
