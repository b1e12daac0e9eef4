"""Optimizers whose updates look at more than an entry of a weight, known classes and others."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


def optimized(make: Callable[[PlainModule], Any]) -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Module(), token_pairs()


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


class OwnStep(torch.optim.Optimizer):
    """Subclasses say how a parameter changes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group["lr"])
        return loss

    def update(self, params: list[Any], lr: float) -> None:
        raise NotImplementedError


class SignMomentum(OwnStep):
    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean.tanh(), alpha=lr)


class TrustRatio(OwnStep):
    """The norm of each parameter, as LARS and LAMB take it."""

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            ratio = float(p.norm()) / (float(p.grad.norm()) + 1e-9)
            p.sub_(p.grad, alpha=lr * ratio)


def whitened(grad: Any) -> Any:
    square = grad.T @ grad
    eye = torch.eye(len(square), dtype=grad.dtype, device=grad.device)
    return torch.linalg.solve(square + square.trace() / len(square) * eye, grad.T).T


class Whitened(OwnStep):
    """A mean of the gradients times an inverse of its columns' products, as Shampoo does."""

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 0.5)
            p.sub_(whitened(mean), alpha=lr * 0.01)


class Factored(OwnStep):
    """Means over rows and columns, as Adafactor has; its states have other shapes."""

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            state, square = self.state[p], p.grad.square() + 1e-12
            row = state.setdefault("row", p.new_zeros(p.shape[0]))
            column = state.setdefault("column", p.new_zeros(p.shape[1]))
            row.lerp_(square.mean(1), 0.5)
            column.lerp_(square.mean(0), 0.5)
            scale = (torch.outer(row, column) / row.mean()).rsqrt()
            p.sub_(p.grad * scale, alpha=lr)


class NormalizedGradient(OwnStep):
    """One norm over all parameters, and momentum."""

    def update(self, params: list[Any], lr: float) -> None:
        norm = sum(float(p.grad.square().sum()) for p in params) ** 0.5
        for p in params:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(0.5).add_(p.grad / norm)
            p.sub_(mean, alpha=lr)


class Perturbed(torch.optim.Optimizer):
    """Sharpness-aware, around another optimizer that keeps states of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.inner = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            moves = [p.grad / norm * 0.05 for p in held]
            torch._foreach_add_(held, moves)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(held, moves)
        self.inner.step()
        return loss


class TwoKinds(OwnStep):
    """One class that whitens matrices and treats the rest entry by entry."""

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            p.sub_(whitened(p.grad) * 0.01 if p.ndim == 2 else p.grad, alpha=lr)


@CASES.add(equal="pp2 zero0", large="zero3")
def across_weights_of_another_layout() -> Any:
    """As channels_last has: what stages send each other lies in memory in another order."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            for p in matrices(self):
                p.data = p.data.T.contiguous().T
            self.first = {n: p.detach().clone() for n, p in self.named_parameters()}

        def on_train_start(self) -> None:
            strategy: Any = self.trainer.strategy
            if hasattr(strategy, "full_parameter"):
                for name, value in self.first.items():
                    assert torch.equal(strategy.full_parameter(name).cpu(), value)

        def configure_optimizers(self) -> Any:
            return NormalizedGradient(self.parameters())

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero1", large="tp2pp2 pp2_interleaved", strategy={"verify": False})
def a_rate_for_each_parameter_by_its_number() -> Any:
    """Stages count the parameters of all, and a schedule has a rate for each group."""

    def make(module: PlainModule) -> Any:
        groups = [
            {"params": [p], "lr": 0.1 * 0.9**number, "weight_decay": 0.1 * (p.ndim > 1)}
            for number, p in enumerate(module.parameters())
        ]
        optimizer = torch.optim.AdamW(groups)
        rates: Any = [group["lr"] for group in groups]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return optimized(make)


@CASES.add(equal="pp2", strategy={"verify": False})
def a_rate_by_the_number_of_weights_of_named_parameters() -> Any:
    """An optimizer that is given names, and a group with a single parameter."""

    def make(module: PlainModule) -> Any:
        named = dict(module.named_parameters())
        first = named.pop("net.emb.weight")
        groups = [{"params": [*named.items()]}, {"params": ("net.emb.weight", first), "lr": 0.2}]
        groups[1]["params"] = [groups[1]["params"]]
        return torch.optim.SGD(groups, lr=1e-2 / len(named))

    return optimized(make)


@CASES.add(equal="tp2 pp2")
def entry_by_entry() -> Any:
    return optimized(lambda m: SignMomentum(m.parameters()))


@CASES.add(equal="tp2 pp2")
def norm_of_each_parameter() -> Any:
    return optimized(lambda m: TrustRatio(m.parameters(), lr=0.01))


@CASES.add(equal="tp2 zero1")
def whitened_by_hand() -> Any:
    return optimized(lambda m: Whitened(matrices(m)))


@CASES.add(equal="tp2 zero3")
def factored_by_hand() -> Any:
    return optimized(lambda m: Factored(matrices(m), lr=0.01))


@CASES.add(equal="tp2pp2 zero3")
def two_kinds_in_one_class() -> Any:
    return optimized(lambda m: TwoKinds(m.parameters(), lr=0.05))


@CASES.add(equal="tp2 zero3", large="zero1tp2 zero2", trainer={"gradient_clip_val": 0.05})
def muon_with_clipping() -> Any:
    return optimized(lambda m: torch.optim.Muon(matrices(m), lr=0.1))


@CASES.add(equal="tp2 zero1", trainer={"accumulate_grad_batches": 2})
def adafactor_with_accumulation() -> Any:
    return optimized(lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1))


@CASES.add(equal="tp2 zero3")
def adafactor_of_transformers() -> Any:
    from transformers.optimization import Adafactor

    options = {"lr": 0.1, "relative_step": False, "scale_parameter": True}
    return optimized(lambda m: Adafactor(m.parameters(), **options))


@CASES.add(equal="tp2")
def rprop() -> Any:
    return optimized(lambda m: torch.optim.Rprop(m.parameters(), lr=0.01))


@CASES.add(equal="pp2 zero3", large="tp2pp2")
def norm_over_all_parameters() -> Any:
    return optimized(lambda m: NormalizedGradient(m.parameters()))


@CASES.add(equal="pp2 zero1")
def sharpness_aware_with_momentum() -> Any:
    return optimized(lambda m: Perturbed(m.parameters(), lr=0.5, momentum=0.9))


@CASES.add(equal="pp2 zero3")
def lbfgs_with_line_search() -> Any:
    options = {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"}
    return optimized(lambda m: torch.optim.LBFGS(m.parameters(), **options))


@CASES.add(equal="pp2", trainer={"gradient_clip_val": 0.1})
def prodigy_that_adapts() -> Any:
    from prodigyopt import Prodigy

    return optimized(lambda m: Prodigy(m.parameters(), lr=1.0, d0=1e-6, growth_rate=1.5))


@CASES.add(equal="pp2 zero3")
def schedule_free() -> Any:
    import schedulefree

    def make(module: nn.Module) -> Any:
        found = schedulefree.AdamWScheduleFree(module.parameters(), lr=1e-2, foreach=False)
        found.train()
        return found

    return optimized(make)


@CASES.add(equal="pp2")
def norm_over_each_group_of_layers() -> Any:
    def make(module: Any) -> Any:
        groups = [
            {"params": b.parameters(), "lr": 0.1 / (i + 1)} for i, b in enumerate(module.net.blocks)
        ]
        rest = [*module.net.emb.parameters(), *module.net.norm.parameters()]
        return NormalizedGradient([*groups, {"params": [*rest, *module.net.head.parameters()]}])

    return optimized(make)


@CASES.add(equal="pp2")
def schedule_of_estimated_steps() -> Any:
    def make(module: Any) -> Any:
        found = NormalizedGradient(module.parameters())
        steps = int(module.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(found, 0.2, steps, cycle_momentum=False)
        return [found], [{"scheduler": schedule, "interval": "step"}]

    return optimized(make)


@CASES.add(equal="pp2")
def frozen_weights() -> Any:
    def make(module: Any) -> Any:
        module.net.emb.requires_grad_(False)
        return NormalizedGradient([p for p in module.parameters() if p.requires_grad])

    return optimized(make)


@CASES.add(equal="pp2")
def declared() -> Any:
    class Declared(NormalizedGradient):
        looks_across = "model"

    return optimized(lambda m: Declared(m.parameters()))


@CASES.add(refused={"tp2": "Wrong.looks_across='everything' must be 'entry', 'parameter' or"})
def declared_wrongly() -> Any:
    class Wrong(NormalizedGradient):
        looks_across = "everything"

    return optimized(lambda m: Wrong(m.parameters()))


class Rounded(OwnStep):
    """Whitened, with steps that are rounded at random; its draws have an order."""

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            p.sub_(whitened(p.grad) + 0.1 * torch.randn_like(p), alpha=lr * 0.01)


@CASES.add(equal="tp2 zero3")
def whitened_with_noise() -> Any:
    return optimized(lambda m: Rounded(matrices(m)))


class Remembering(Whitened):
    """Reads the weights before its closure has run."""

    def step(self, closure: Any = None) -> Any:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        loss = super().step(closure)
        with torch.no_grad():
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                p.lerp_(old, 0.3)
        return loss


@CASES.add(equal="tp2 zero3")
def weights_read_before_the_closure() -> Any:
    return optimized(lambda m: Remembering(matrices(m)))


class Counted(Whitened):
    """Counts its steps in states before its closure has run, as one may."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.data = p.data * 0.99
        return super().step(closure)

    def update(self, params: list[Any], lr: float) -> None:
        super().update(params, lr / max(self.state[p]["step"] for p in params))


@CASES.add(equal="tp2 zero3")
def states_written_before_the_closure() -> Any:
    return optimized(lambda m: Counted(matrices(m)))


class Grouped(Whitened):
    """Counts in its group, if that has a gradient; its rate falls with the count."""

    def update(self, params: list[Any], lr: float) -> None:
        if params:
            group = self.param_groups[0]
            group["count"] = group.get("count", 0) + 1
            super().update(params, lr / group["count"])


@CASES.add(equal="tp2 zero3", trainer={"limit_train_batches": 2})
def a_count_of_a_group_without_some_gradients() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Grouped(matrices(self))

        def on_train_epoch_start(self) -> None:
            for p in matrices(self)[::2]:
                p.requires_grad_(self.current_epoch > 0)

    return Module(), token_pairs()


class Hooked(PlainModule):
    """Follows the norm of all weights by a hook of the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = Whitened(matrices(self))
        optimizer.register_step_post_hook(self.follow)
        return optimizer

    def follow(self, optimizer: Any, *_: Any) -> None:
        weights = [p.detach().norm() for p in optimizer.param_groups[0]["params"]]
        optimizer.param_groups[0]["lr"] = 0.1 / float(torch.stack(weights).norm())


@CASES.add(equal="tp2 zero3")
def a_hook_of_the_optimizer_after_its_step() -> Any:
    return Hooked(), token_pairs()


class Averaged(OwnStep):
    """Shows the average of the weights once training has ended, as one without a schedule does."""

    looks_across = "entry"

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            p.sub_(p.grad, alpha=lr)
            self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def eval(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["mean"])


@CASES.add(equal="tp2 pp2", large="zero1 zero3 tp2pp2 zero1tp2")
def averages_shown_after_the_run() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Averaged(self.parameters())

        def on_fit_end(self) -> None:
            optimizer: Any = self.trainer.optimizers[0]
            # As a checkpoint after the run does; the optimizer stays whole.
            assert self.trainer.strategy.optimizer_state(optimizer)["state"]
            optimizer.eval()

    return Module(), token_pairs()


class ReadsStates(PlainModule):
    """Sets its learning rate by what the optimizer keeps, in each of the ways to read it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def on_train_start(self) -> None:
        states = self.trainer.optimizers[0].state
        self.lr = 0.01 + sum(len(states[p]) for p in self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        states = [optimizer.state[p] for p in self.parameters()]
        total = sum(float(state["exp_avg_sq"].sum()) for state in states)
        total += sum(float(state["step"]) for state in optimizer.state.values())
        total += len(optimizer.state) + sum(p in optimizer.state for p in self.parameters())
        total += float(states[0].get("exp_avg").abs().sum())
        optimizer.param_groups[0]["lr"] = self.lr + 1e-3 * total


@CASES.add(equal="pp2 zero2_offload zero3", large="tp2 zero1 zero2 tp2pp2")
def states_that_hooks_read() -> Any:
    return ReadsStates(), token_pairs()


def of_processes(rate: Callable[[Any], float]) -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate(self.trainer))

    return Module(), token_pairs()


@CASES.add(refused={"tp2 pp2 zero1": r"computes lr=0\.2\d* .*on one process it is 0\.1"})
def learning_rate_by_the_number_of_processes() -> Any:
    return of_processes(lambda trainer: 0.1 * trainer.world_size)


@CASES.add(refused={"zero3": r"computes lr=0\.2 .*get_world_size"})
def learning_rate_by_the_ranks_of_torch() -> Any:
    return of_processes(lambda _: 0.1 * (dist.get_world_size() if dist.is_initialized() else 1))


@CASES.add(refused={"tp2": r"computes lr=0\.2 .*environ\['WORLD_SIZE'\]"})
def learning_rate_by_a_variable() -> Any:
    return of_processes(lambda _: 0.1 * int(os.environ.get("WORLD_SIZE", "1")))


@CASES.add(equal="tp2 zero3")
def number_of_processes_read_without_effect() -> Any:
    return of_processes(lambda trainer: 0.1 if trainer.world_size > 0 else 1.0)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
