"""Hooks that write to slices of weights and gradients, which ranks divide."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from tests.distributed.user_code.test_hooks import rate_of
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
ROWS = torch.arange(64)


def hooked(act: Callable[[Any], None], hook: str) -> Any:
    """A hook writes to what `act` takes of the network."""

    def run(self: PlainModule, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            act(self.net)

    return type("Module", (PlainModule,), {hook: run})(), token_pairs()


@CASES.add(equal="zero3 pp2", large="tp2 zero1 tp2pp2 zero1tp2")
def slices_of_gradients() -> Any:
    def act(net: Any) -> None:
        emb, up = net.emb.weight.grad, net.blocks[1].mlp.up.weight.grad
        emb[:8].mul_(0)
        emb[9] = 0.25
        emb[ROWS > 60] = 0
        emb[:, 3] *= 2
        emb[10:20][2:4].add_(emb[30:32])
        up.narrow(0, 4, 20).mul_(0.1)
        up.select(0, 31).neg_()
        up.t()[:4].mul_(3)
        up.unbind(0)[1].zero_()
        up.split(16)[1].div_(2)
        for part in up.chunk(3):
            part.div_(1 + part.norm())

    return hooked(act, "on_after_backward")


@CASES.add(equal="tp2 pp2", large="zero3 zero1 tp2pp2")
def masks_and_rows_of_gradients_before_the_step() -> Any:
    def act(net: Any) -> None:
        emb = net.emb.weight.grad
        emb.mul_((ROWS >= 8).to(emb)[:, None])
        emb.view(4, 16, -1)[0].fill_(0.1)
        for row in net.blocks[0].mlp.up.weight.grad:
            row.div_(1 + row.norm())

    return hooked(act, "on_before_optimizer_step")


@CASES.add(equal="zero3 pp2", large="tp2 zero1 tp2pp2 zero2_offload")
def rows_of_weights() -> Any:
    def act(net: Any) -> None:
        emb, up = net.emb.weight, net.blocks[1].mlp.up.weight
        emb[:8] = 0.5
        emb.data[8:10].zero_()
        emb[11].copy_(emb[40])
        emb[20:24] = emb[50:54].clone()
        emb[30:34].normal_()
        for row in up:
            row.div_(row.norm())
        part = up[:5]
        part.mul_(2)
        up[0].mul_(part.norm())

    return hooked(act, "on_train_batch_end")


@CASES.add(equal="tp2 pp2", large="zero3")
def rows_of_gradients_within_the_update() -> Any:
    class Module(PlainModule):
        def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any = None) -> None:
            def run() -> Tensor:
                loss: Tensor = closure()
                self.net.emb.weight.grad[:8] = 0
                return loss

            optimizer.step(closure=run)

    return Module(), token_pairs()


@CASES.add(equal="zero3 pp2", large="tp2 zero1 tp2pp2")
def rows_of_weights_in_hooks_of_the_optimizer() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            def before(*_: Any) -> None:
                with torch.no_grad():  # Lightning computes the gradients inside of the step
                    self.net.blocks[1].mlp.up.weight[3:9] *= 0.5

            def after(*_: Any) -> None:
                with torch.no_grad():
                    self.net.emb.weight[:8].mul_(0.5)

            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
            return optimizer

    return Module(), token_pairs()


NEVER_CALLED = (
    r"register_hook\(\.\.\.\) at test_slices\.py.*hook would never be called.*on_after_backward"
)


OF_A_PART = r"register_hook\(\.\.\.\) at test_slices\.py.*gradient of a part of the batch.*on_after"


@CASES.add(equal="tp2", refused={"zero3 zero1tp2": NEVER_CALLED, "zero0 cp2": OF_A_PART})
def rows_of_a_gradient_in_a_hook_of_its_weight() -> Any:
    def hide(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:8] = 0
        return grad

    class Module(PlainModule):
        def on_fit_start(self) -> None:
            self.net.emb.weight.register_hook(hide)

    return Module(), token_pairs()


class Listed(PlainNet):
    """Has lists of modules before and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        # In the place of `emb`, as what stands before the blocks runs before them.
        self.emb = nn.Sequential(self.emb, nn.Linear(32, 32), nn.GELU())  # type: ignore[assignment]
        self.norm = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))  # type: ignore[assignment]
        self.head = nn.ModuleDict({n: nn.Linear(32, 32) for n in ("low", "high")})  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return torch.cat([head(h) for head in self.head.values()], -1)


@CASES.add(equal="pp2 zero3", large="pp2_interleaved")
def entries_of_lists_of_modules() -> Any:
    """By number and name, in loops, and how many there are."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__(Listed())

        @torch.no_grad()
        def on_train_batch_end(self, *_: Any) -> None:
            net = self.net
            found = float(net.norm[-1].weight.norm()) + float(net.emb[1].bias.sum())
            found += sum(float(head.weight.norm()) for head in net.head.values())
            found += sum(float(part.bias.sum()) for part in net.norm) + len(net.emb)
            net.head["low"].weight.mul_(0.9)
            net.emb[1].bias.add_(0.01)
            rate_of(self, found)

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
