"""Hooks between the backward and the optimizer that look at gradients, or change them."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities import grad_norm as norms_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as clip
from torch.nn.utils import clip_grad_value_, get_total_norm

from lightning_par import ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


def hooked(act: Callable[[PlainModule], None], hook: str = "on_before_optimizer_step") -> Any:
    """A hook does something to the gradients."""

    def run(self: PlainModule, *_: Any, **__: Any) -> None:
        act(self)

    return type("Module", (PlainModule,), {hook: run})(), token_pairs()


def grads(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@CASES.add(equal="tp2pp2 zero3", large="tp2 pp2")
def clipped_by_torch() -> Any:
    return hooked(lambda m: clip(m.parameters(), 0.05), "configure_gradient_clipping")


@CASES.add(equal="tp2 pp2", large="zero0")
def clipped_after_the_backward_by_the_largest() -> Any:
    return hooked(lambda m: clip(m.parameters(), 1e-3, norm_type=float("inf")), "on_after_backward")


@CASES.add(equal="pp2 zero3", large="tp2")
def each_parameter_clipped() -> Any:
    def act(module: nn.Module) -> None:
        for parameter in module.parameters():
            clip(parameter, 0.01)

    return hooked(act)


@CASES.add(equal="tp2 pp2")
def each_block_clipped() -> Any:
    def act(module: Any) -> None:
        for block in module.net.blocks:
            clip(list(block.parameters()), 0.01)

    return hooked(act)


@CASES.add(equal="tp2 pp2", large="zero1 tp2pp2 zero3")
def zeroed_every_second_step() -> Any:
    class Module(PlainModule):
        lr = 0.1

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    return Module(), token_pairs()


@CASES.add(equal="tp2")
def weights_without_an_optimizer_count_in_the_norm() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.blocks.parameters(), lr=self.lr)

        def on_after_backward(self) -> None:
            clip(self.parameters(), 0.05)

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2pp2")
def each_group_of_the_optimizer_clipped() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            held = list(self.parameters())
            groups = [[p for p in held if p.ndim == n] for n in (1, 2)]
            return torch.optim.SGD([{"params": group} for group in groups], lr=self.lr)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                clip(group["params"], 0.02)

    return Module(), token_pairs()


class ScalesToOne(DoublePrecision):
    """A precision plugin of one's own, which sees the gradients of the whole model, too."""

    def post_backward(self, tensor: Any, module: Any) -> Any:
        """Scale all gradients by their norm, and add noise."""
        loss = super().post_backward(tensor, module)
        norm = sum(float(p.grad.norm()) ** 2 for p in module.parameters()) ** 0.5
        for parameter in module.parameters():
            parameter.grad.add_(1e-3 * torch.randn_like(parameter)).div_(norm)
        return loss


@CASES.add(equal="pp2", trainer={"precision": None, "plugins": ScalesToOne()})
def gradients_of_all_stages_in_a_precision_plugin() -> Any:
    return PlainModule(), token_pairs()


@CASES.add(refused={"pp2": r"different calls .*the norm of 2 gradients, .*the norm of 1 grad"})
def a_norm_of_other_gradients_on_each_rank() -> Any:
    def act(module: PlainModule) -> None:
        get_total_norm(grads(module)[: 2 - module.global_rank])

    return hooked(act)


def with_backward_hooks(name: str) -> Any:
    """Gradients of the inputs of some modules are halved."""
    module = PlainModule()
    for path, part in module.named_modules():
        if path.startswith("net.blocks.") and path.split(".")[-1] == name:
            part.register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,))
    return module, token_pairs()


@CASES.add(
    equal="zero3",
    large="tp2",
    refused={"pp2": "block 1 is the last block of a pipeline stage"},
    blocks=4,
)
def backward_hooks_of_blocks() -> Any:
    return with_backward_hooks("1")


@CASES.add(equal="tp2pp2 zero3")
def backward_hooks_inside_blocks() -> Any:
    return with_backward_hooks("mlp")


@CASES.add(equal="tp2 pp2", large="tp2pp2")
def matrices_clipped() -> Any:
    return hooked(lambda m: clip([p for p in m.parameters() if p.ndim == 2], 0.02))


@CASES.add(equal="tp2 pp2", large="zero3 tp2pp2 pp2_interleaved")
def each_linear_layer_clipped() -> Any:
    def act(module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                clip(layer.parameters(), 0.02)

    return hooked(act)


@CASES.add(equal="tp2 pp2", large="zero3")
def scaled_to_a_norm_of_one() -> Any:
    def act(module: nn.Module) -> None:
        norm = get_total_norm(grads(module))
        for grad in grads(module):
            grad.div_(norm * 10)

    return hooked(act)


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2")
def norm_logged_by_lightning() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = norms_of(self, 2)
            assert len(norms) == 1 + sum(1 for _ in norms if "weight" in _ or "bias" in _)
            self.log("loss", norms["grad_2.0_norm_total"])
            self.log_dict(norms)

    return Module(), token_pairs()


def scale_by_hand(module: nn.Module) -> None:
    norm = torch.stack([g.norm() for g in grads(module)]).norm()
    for grad in grads(module):
        grad.mul_(0.05 / norm)


@CASES.add(equal="tp2 pp2", large="zero3 tp2pp2")
def norm_over_all_by_hand() -> Any:
    return hooked(scale_by_hand)


@CASES.add(equal="tp2 pp2")
def norm_over_all_by_hand_where_gradients_are_clipped() -> Any:
    return hooked(scale_by_hand, "configure_gradient_clipping")


@CASES.add(equal="tp2 pp2")
def norm_over_all_in_numbers() -> Any:
    def act(module: nn.Module) -> None:
        norm = sum(g.norm().item() ** 2 for g in grads(module)) ** 0.5
        for grad in grads(module):
            grad.mul_(0.05 / norm)

    return hooked(act, "on_after_backward")


def clip_units(module: nn.Module) -> None:
    """Adaptive clipping, as timm has it: by the norms of the rows of weights."""

    def norm(x: Any) -> Any:
        dims = tuple(range(1, x.ndim))
        return x.norm(2.0, dim=dims, keepdim=True) if dims else x.norm(2.0)

    for p in module.parameters():
        weight, grad = p.detach(), p.grad.detach()
        most = norm(weight).clamp_(min=1e-3).mul_(0.01)
        now = norm(grad)
        clipped = grad * (most / now.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(now < most, grad, clipped))


@CASES.add(equal="pp2 zero3", large="tp2 zero1 tp2pp2")
def each_row_clipped_by_the_norm_of_its_weight() -> Any:
    return hooked(clip_units, "on_after_backward")


@CASES.add(equal="tp2 zero1")
def each_row_clipped_where_gradients_are_clipped() -> Any:
    return hooked(clip_units, "configure_gradient_clipping")


@CASES.add(equal="tp2 pp2", large="zero1")
def signs_of_gradients() -> Any:
    def act(module: nn.Module) -> None:
        for grad in grads(module):
            grad.sign_().mul_(1e-3)

    return hooked(act, "on_after_backward")


@CASES.add(equal="pp2 zero3 zero2_offload", large="tp2")
def noise_on_gradients() -> Any:
    def act(module: nn.Module) -> None:
        for parameter in module.parameters():
            noise = torch.randn_like(parameter.grad) * torch.empty_like(parameter.grad).uniform_()
            parameter.grad.add_(noise * torch.bernoulli(torch.full_like(noise, 0.7)), alpha=0.01)

    return hooked(act)


@CASES.add(equal="tp2 pp2", large="zero3")
def noise_of_a_generator_of_each_parameter() -> Any:
    """What the refusal offers."""

    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for name, p in self.named_parameters():
                g = torch.Generator(p.device)
                g.manual_seed(zlib.crc32(f"{self.trainer.global_step} {name}".encode()))
                p.grad.add_(torch.empty_like(p.grad).normal_(generator=g), alpha=0.01)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2")
def noise_of_the_optimizer() -> Any:
    """Langevin dynamics."""

    class Langevin(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            return loss

    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Langevin(self.parameters(), lr=self.lr)

    return Module(), token_pairs()


@CASES.add(equal="pp2 tp2")
def entries_clipped() -> Any:
    return hooked(lambda m: clip_grad_value_(m.parameters(), 1e-3))


@CASES.add(equal="pp2 tp2", large="zero3")
def centralized_gradients() -> Any:
    def act(module: nn.Module) -> None:
        for grad in grads(module):
            if grad.ndim > 1:
                grad.sub_(grad.mean(1, keepdim=True))

    return hooked(act)


@CASES.add(equal="pp2", large="tp2pp2")
def what_all_weights_and_gradients_give() -> Any:
    """Names, numbers, histograms, norms of a choice, and gradients that are replaced or removed."""

    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            named = dict(self.named_parameters())
            seen = sum(p.numel() for p in named.values()) / 1e5 + len(named) / 10
            arrays = {n: p.grad.detach().cpu().numpy() for n, p in named.items()}
            seen += sum(float(abs(a).max()) for a in arrays.values())
            seen += float(torch.histc(named["net.head.weight"].detach(), 5, -1, 1)[2]) / 100
            seen += float(clip(self.net.head.parameters(), 0.1))
            seen += float(clip([p for n, p in named.items() if "norm" in n], 1e-3))
            for name, p in named.items():
                p.grad = None if name.endswith("down.bias") else p.grad / (1 + seen)

    return Module(), token_pairs()


@CASES.add(
    refused={"pp2": r"wait for each other in different calls .* A logger writes on rank 0 only"}
)
def histograms_on_rank_zero_alone() -> Any:
    def act(module: PlainModule) -> None:
        if module.trainer.is_global_zero:
            [p.grad.numpy() for p in module.parameters()]

    return hooked(act)


class _Decay(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.02)


@CASES.add(equal="pp2 zero3", large="tp2", trainer=lambda: {"callbacks": [_Decay()]})
def penalty_as_a_gradient() -> Any:
    return PlainModule(), token_pairs()


@CASES.add(equal="tp2 pp2", large="zero3")
def norms_from_the_strategy() -> Any:
    """What the refusals offer, next to what one process computes."""

    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy: Any = self.trainer.strategy
            if hasattr(strategy, "gradient_norms"):
                norms = strategy.gradient_norms()
                head = strategy.full_parameter("net.head.weight").norm()
                emb = strategy.full_parameter("net.emb.weight").norm()
            else:
                norms = {n: p.grad.norm() for n, p in self.named_parameters()}
                head, emb = (m.weight.detach().norm() for m in (self.net.head, self.net.emb))
            assert len(norms) == 17
            norm = torch.stack(list(norms.values())).norm()
            for grad in grads(self):
                grad.mul_(float(0.05 / norm * head / emb))

    return Module(), token_pairs()


def offloaded(act: Callable[[Any], None], hook: str, *callbacks: Any) -> Any:
    """The same with an optimizer that the host can step."""

    def run(self: PlainModule, *_: Any, **__: Any) -> None:
        act(self)

    def configure_optimizers(self: PlainModule) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)

    own = {hook: run, "configure_optimizers": configure_optimizers}
    return type("Module", (PlainModule,), own)(), token_pairs()


@CASES.add(equal="zero2_offload")
def signs_turned_after_the_backward_of_the_host() -> Any:
    def act(module: Any) -> None:
        for parameter in module.net.head.parameters():
            parameter.grad.mul_(-1)

    return offloaded(act, "on_after_backward")


@CASES.add(equal="zero2_offload", trainer={"accumulate_grad_batches": 2})
def clipped_by_torch_before_the_step_of_the_host() -> Any:
    return offloaded(lambda m: clip(m.parameters(), 0.01), "configure_gradient_clipping")


@CASES.add(equal="zero2_offload")
def weights_written_after_the_step_of_the_host() -> Any:
    """The masters of the host have to follow, or the next update takes the change back."""

    def act(module: Any) -> None:
        with torch.no_grad():
            module.net.head.weight.copy_(F.normalize(module.net.head.weight, dim=1))

    return offloaded(act, "on_train_batch_end")


@CASES.add(equal="zero2_offload")
def weights_clamped_through_data_after_the_step_of_the_host() -> Any:
    def act(module: Any) -> None:
        for parameter in module.net.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    return offloaded(act, "on_train_batch_end")


@CASES.add(large="zero2_offload", strategy={"on_nonfinite": "ignore"})
def gradients_removed_before_the_step_of_the_host() -> Any:
    def act(module: Any) -> None:
        for parameter in module.net.blocks[1].parameters():
            parameter.grad = None

    return offloaded(act, "on_before_optimizer_step")


@CASES.add(
    large="zero2_offload",
    trainer=lambda: {"callbacks": [_Decay()], "gradient_clip_val": 0.05},
)
def penalty_of_a_callback_before_the_step_of_the_host() -> Any:
    return offloaded(lambda m: None, "on_train_start")


@CASES.add(
    large="zero2_offload", trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
)
def entries_that_the_module_does_not_clip() -> Any:
    """`configure_gradient_clipping` is the user's, and does nothing with the Trainer's number."""
    return offloaded(lambda m: None, "configure_gradient_clipping")


class _StepsItself(PlainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        for parameter in self.net.head.parameters():
            parameter.grad.mul_(0.1)
        optimizer.step()


@CASES.add(equal="zero2_offload", large="zero2")
def an_own_step_that_changes_gradients_for_the_host() -> Any:
    return _StepsItself(), token_pairs()


@CASES.add(equal="tp2pp2", strategy={"sequence_parallel": False})
def positions_and_marks_with_one_gradient() -> Any:
    """Of one sample, autograd gives both parameters the same tensor, to which it adds later."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, 32)
            self.positions = nn.Parameter(torch.randn(1, 6, 32))
            self.marks = nn.Parameter(torch.randn(1, 6, 32))

        def forward(self, x: Any) -> Any:
            return self.tokens(x) + self.positions + self.marks

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net.emb = Embedding()

        def parallel_plan(self) -> ParallelPlan:
            plan = super().parallel_plan()
            tensor = {n: style for n, style in plan.tensor.items() if n != "net.emb"}
            given = {"net.emb": "replicated", "net.emb.tokens": "vocab_embedding"}
            return replace(plan, tensor={**tensor, **given})

    return Module(), token_pairs(length=6)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
