"""Optimizers whose states user code loads, resets and replaces, and wrappers of others' classes."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import StepLR

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
_EVERYWHERE = "tp2 pp2 zero3 zero2_offload"


class Adam(PlainModule):
    """Trains with what the host can step, too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


def saved_states() -> dict[str, Any]:
    """Return what a run on one process has saved."""
    with torch.random.fork_rng():
        module = Adam().double()
        optimizer = module.configure_optimizers()
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (1 + number % 5))
        optimizer.step()
        optimizer.step()
    return optimizer.state_dict()  # type: ignore[no-any-return]


class Sharpness(torch.optim.Optimizer):
    """Has another optimizer inside, and puts weights back by their `data`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)

    @torch.no_grad()
    def climb(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm() + 1e-12
        for p in held:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, state in self.state.items():
            p.data = state["before"]
        self.base.step()
        self.zero_grad()


@CASES.add(equal="zero1 tp2", large="zero3")
def sharpness_by_an_optimizer_that_sets_data() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.climb()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return Sharpness(self.parameters(), lr=0.1, momentum=0.9)

    return Module(), token_pairs()


class Average(Callback):
    """Swaps an average of the weights in for a moment, by their `data`."""

    def __init__(self) -> None:
        self.shadow: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        kept = {}
        for name, p in pl_module.named_parameters():
            self.shadow[name] = self.shadow.get(name, p.data.clone()) * 0.9 + p.data * 0.1
            kept[name] = p.data
            p.data = self.shadow[name].clone()
        for name, p in pl_module.named_parameters():
            p.data = kept[name]


@CASES.add(equal="tp2 pp2", large="zero3 tp2pp2", trainer=lambda: {"callbacks": [Average()]})
def an_average_that_is_swapped_in_by_data() -> Any:
    return PlainModule(), token_pairs()


@CASES.add(equal=_EVERYWHERE, large="tp2pp2")
def states_loaded_where_the_optimizer_is_made() -> Any:
    class Module(Adam):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.load_state_dict(saved_states())
            return optimizer

    return Module(), token_pairs()


@CASES.add(equal=_EVERYWHERE, large="tp2pp2")
def states_loaded_before_the_first_step() -> Any:
    class Module(Adam):
        def on_train_start(self) -> None:
            self.trainer.optimizers[0].load_state_dict(saved_states())

    return Module(), token_pairs()


def after_step(act: Callable[[Any, Any], None], step: int) -> Any:
    def run(self: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        if batch_idx == step:
            act(self, self.trainer.optimizers[0])

    return type("Module", (Adam,), {"on_train_batch_end": run})(), token_pairs()


@CASES.add(equal="zero3 zero2_offload", large="tp2 pp2")
def states_of_an_earlier_step_loaded_again() -> Any:
    class Module(Adam):
        def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            optimizer = self.trainer.optimizers[0]
            if batch_idx == 0:
                self.kept = copy.deepcopy(optimizer.state_dict())
            if batch_idx == 2:
                optimizer.load_state_dict(self.kept)

    return Module(), token_pairs()


@CASES.add(equal="zero2_offload", large="zero3 tp2 pp2")
def states_that_are_cleared() -> Any:
    return after_step(lambda _, optimizer: optimizer.state.clear(), 1)


@CASES.add(equal="zero2_offload", large="zero3 tp2")
def states_with_other_tensors_and_numbers() -> Any:
    def act(_: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.ones_like(state["exp_avg"])
            state["exp_avg_sq"].mul_(0.25)
            state["step"].fill_(7)

    return after_step(act, 1)


class Bare(torch.optim.Optimizer):
    """Does not call the constructor of torch, and looks at whole gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state, self.defaults = defaultdict(dict), {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() + 1e-3), alpha=group["lr"])
        return loss


@CASES.add(equal="tp2 pp2", large="zero3")
def without_the_constructor_of_torch() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            optimizer = Bare(self.parameters(), lr=0.1)
            schedule = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Module(), token_pairs()


class Slow(Bare):
    """Wraps another optimizer, and keeps a list of copies."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state, self.defaults = inner.state, inner.defaults
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)
        return loss


class SlowByEntry(Slow):
    looks_across = "entry"


def wrapped(kind: type[Slow]) -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return kind(torch.optim.SGD(self.parameters(), lr=0.1))

    return Module(), token_pairs()


@CASES.add(
    refused={"tp2 pp2": "Slow stores parameters or copies of them in slow.*'entry' in the class"}
)
def copies_in_a_list() -> Any:
    return wrapped(Slow)


@CASES.add(equal="tp2 pp2", large="zero3")
def copies_in_a_list_of_an_update_by_entry() -> Any:
    return wrapped(SlowByEntry)


@CASES.add(equal=_EVERYWHERE)
def another_optimizer_in_a_hook() -> Any:
    class Module(Adam):
        def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.1)]

    return Module(), token_pairs()


class Averaging(torch.optim.Optimizer):
    """Averages gradients over all ranks itself, as scripts without a strategy do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad


@CASES.add(equal="zero1 zero3")
def gradients_averaged_by_the_optimizer() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Averaging(self.parameters())

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
