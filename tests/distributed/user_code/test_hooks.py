"""Hooks between the steps, in which a divided module looks whole."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, ModelSummary
from torch import nn, Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


def rate_of(module: pl.LightningModule, number: Any) -> None:
    """Train on with a rate that depends on a number: all later weights depend on it, too."""
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(number) / 1000


def with_hook(name: str, number: Callable[[PlainModule], Any]) -> Any:
    """A hook whose number sets the rate."""

    class Module(PlainModule):
        pass

    def hook(module: PlainModule, *_: Any) -> None:
        rate_of(module, number(module))

    setattr(Module, name, hook)
    return Module(), token_pairs()


def norm_after(closure: Callable[[], Any], parameters: Any) -> Tensor:
    """Return the norm that `optimizer_step` judges by."""
    closure()
    return torch.nn.utils.get_total_norm([p.grad for p in parameters])


@CASES.add(equal="pp2", large="tp2 zero3 tp2pp2 zero2_offload")
def update_left_out_by_the_norm() -> Any:
    class Module(PlainModule):
        def optimizer_step(self, _: int, i: int, optimizer: Any, closure: Any = None) -> None:
            norm = norm_after(closure, self.parameters())
            rate_of(self, norm)
            if i != 1:
                optimizer.step()

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3")
def norm_by_hand_after_the_closure() -> Any:
    class Module(PlainModule):
        def optimizer_step(self, _: int, i: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            rate_of(self, sum(float(p.grad.norm()) ** 2 for p in self.parameters()) ** 0.5)
            optimizer.step()

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3 tp2pp2")
def weights_and_gradients_around_the_update() -> Any:
    """The closure is one of the user's, in which there is Lightning's."""

    class Module(PlainModule):
        def optimizer_step(self, _: int, i: int, optimizer: Any, closure: Any = None) -> None:
            before = sum(float(p.detach().abs().mean()) for p in self.parameters())

            def inner() -> Any:
                loss = closure()
                largest = max(float(p.grad.abs().max()) for p in self.parameters())
                for p in self.parameters():
                    p.grad.div_(before + largest)
                return loss

            optimizer.step(closure=inner)
            with torch.no_grad():
                norm = torch.stack([p.norm() for p in self.parameters()]).norm()
                for p in self.parameters():
                    p.mul_(0.99 + 0.01 / norm)

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3")
def the_norms_of_the_strategy_after_the_closure() -> Any:
    class Module(PlainModule):
        def optimizer_step(self, _: int, i: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            strategy: Any = self.trainer.strategy
            if hasattr(strategy, "gradient_norms"):
                norms = strategy.gradient_norms().values()
            else:
                norms = [p.grad.norm() for p in self.parameters()]
            rate_of(self, sum(float(n) ** 2 for n in norms) ** 0.5)
            optimizer.step()

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero1tp2", large="tp2 zero1 zero3 tp2pp2")
def numbers_of_all_weights_after_a_step() -> Any:
    def number(module: PlainModule) -> Any:
        named = dict(module.named_parameters())
        found = sum(float(p.detach().norm()) ** 2 for p in named.values()) ** 0.5
        found += float(torch.cat([p.detach().flatten() for p in named.values()]).abs().max())
        found += float(torch.nn.utils.get_total_norm([p.grad for p in named.values()]))
        found += float(torch.stack([p.detach().mean() for p in named.values()]).std())
        found += sum(float(p.detach().cpu().numpy().max()) for p in named.values())
        found += float((module.net.blocks[-1].mlp.down.weight > 0).sum()) / 1000
        return found + sum(p.numel() for p in named.values()) / 1e6 + len(named)

    return with_hook("on_train_batch_end", number)


@CASES.add(equal="pp2", large="tp2 zero3 tp2pp2")
def a_state_dict_that_all_ranks_save() -> Any:
    def number(module: PlainModule) -> Any:
        import io

        file = io.BytesIO()
        torch.save(module.net.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        assert all(type(v) is Tensor for v in saved.values())
        return len(saved) + sum(float(v.double().norm()) for v in saved.values())

    return with_hook("on_train_batch_end", number)


class Balanced(PlainNet):
    """Blocks that count what they choose in a buffer, and keep buffers of parts."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("bias", torch.zeros(32))
            block.register_buffer("count", torch.zeros(32), persistent=False)
            block.inner = nn.Module()
            block.inner.register_buffer("scale", torch.ones(32))
            block.register_forward_pre_hook(self._choose)

    @staticmethod
    def _choose(block: Any, args: Any) -> Any:
        (x,) = args
        chosen = (x.detach() + block.bias) > 0.1
        if block.training:
            with torch.no_grad():
                block.count += chosen.flatten(0, -2).sum(0)
        return x * block.inner.scale + 0.1 * torch.where(chosen, x, 0)


@CASES.add(equal="pp2", large="zero3")
def buffers_of_all_blocks_are_changed_after_a_step() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__(Balanced())

        @torch.no_grad()
        def on_train_batch_end(self, *_: Any) -> None:
            for block in self.net.blocks:
                block.bias += 0.01 * torch.sign(block.count.mean() - block.count)
                block.count.zero_()
                block.inner.scale.mul_(0.99)
            for _, buffer in self.net.named_buffers():
                buffer.add_(1e-3)
            state = {n: v for n, v in self.net.state_dict().items() if "bias" in n or "scale" in n}
            assert not any("count" in name for name in self.net.state_dict())
            rate_of(self, sum(float(value.abs().sum()) for value in state.values()))

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2")
def weights_of_a_part_are_loaded_before_the_run() -> Any:
    """The proof begins with them, although the hook runs on its one process, too."""

    class Module(PlainModule):
        def on_fit_start(self) -> None:
            state = self.net.state_dict()
            chosen = {name: value / 2 for name, value in state.items() if "blocks.1" in name}
            keys = self.net.load_state_dict({**chosen, "other": torch.ones(1)}, strict=False)
            assert keys.missing_keys == [name for name in state if name not in chosen]
            assert keys.unexpected_keys == ["other"]

    return Module(), token_pairs()


@CASES.add(
    refused={"pp2 zero3": r"wait for each other in different .* rank 1: the end of the hook"}
)
def a_norm_on_rank_zero_alone() -> Any:
    def number(module: PlainModule) -> Any:
        if module.trainer.is_global_zero:
            return module.net.emb.weight.detach().norm()
        return 0

    return with_hook("on_train_start", number)


@CASES.add(equal="pp2")
def norms_over_the_parameters_of_the_optimizer() -> Any:
    def number(module: PlainModule) -> Any:
        (group,) = module.trainer.optimizers[0].param_groups
        return sum(float(p.detach().norm()) for p in group["params"])

    return with_hook("on_train_start", number)


@CASES.add(equal="pp2")
def states_of_the_optimizer() -> Any:
    def number(module: PlainModule) -> Any:
        optimizer: Any = module.trainer.optimizers[0]
        return sum(len(optimizer.state[p]) for p in optimizer.param_groups[0]["params"])

    return with_hook("on_train_start", number)


@CASES.add(equal="pp2 tp2pp2")
def members_of_groups_where_some_join_later() -> Any:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            first = self.net.emb.parameters()
            return torch.optim.Adam([{"params": first, "lr": 1e-3}], weight_decay=0.1)

        def on_train_start(self) -> None:
            rest = [p for n, p in self.named_parameters() if ".emb." not in n]
            self.trainer.optimizers[0].add_param_group({"params": rest, "lr": 1e-2})

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                largest = max(float(p.grad.abs().max()) for p in group["params"])
                for p in group["params"]:
                    p.grad.div_(largest)

    return Module(), token_pairs()


class Average(pl.Callback):
    """An average of weights by hand, whose values set the rate."""

    def __init__(self, begin: str, make: Callable[[Any], Any]) -> None:
        self.make, self.average = make, None
        setattr(self, begin, self.begin)

    def begin(self, trainer: Any, module: Any, **_: Any) -> None:
        self.average = self.make(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        average: Any = self.average
        if isinstance(average, AveragedModel):
            average.update_parameters(module.net)
            held = [*average.parameters()]
        elif isinstance(average, nn.Module):
            for mine, p in zip(average.parameters(), module.net.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            held = [*average.parameters()]
        else:
            for name, p in module.net.named_parameters():
                average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
            held = [*average.values()]
        rate_of(module, sum(float(p.norm()) for p in held))


def averaged(begin: str, make: Callable[[Any], Any]) -> Any:
    """The callback and its module; the Trainer of a case gets no callbacks of its own."""

    class Module(PlainModule):
        def configure_callbacks(self) -> Any:
            return [Average(begin, make)]

    return Module(), token_pairs()


def values_of(module: Any) -> dict[str, Tensor]:
    """Return copies of all weights."""
    return {n: p.detach().clone() for n, p in module.net.named_parameters()}


def _initialized(go: Callable[[nn.Module], Iterable[nn.Parameter]]) -> Any:
    class Module(PlainModule):
        def on_train_start(self) -> None:
            for weight in go(self.net):
                nn.init.normal_(weight, std=0.05)
                nn.init.kaiming_uniform_(weight, a=2.0)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero1tp2", large="zero3")
def weights_of_each_linear_layer_are_drawn_again() -> Any:
    return _initialized(lambda net: [m.weight for m in net.modules() if isinstance(m, nn.Linear)])


@CASES.add(equal="pp2")
def weights_of_all_parameters_are_drawn_again() -> Any:
    return _initialized(lambda net: [p for _, p in net.named_parameters() if p.ndim == 2])


@CASES.add(equal="pp2 zero1tp2", large="tp2 zero1 zero3 tp2pp2 zero2_offload")
def shadow_made_before_the_mesh() -> Any:
    return averaged("setup", values_of)


@CASES.add(equal="pp2", large="tp2 zero1 zero3 tp2pp2")
def shadow_made_on_the_mesh() -> Any:
    return averaged("on_train_start", values_of)


@CASES.add(equal="pp2 zero1tp2", large="tp2 zero3 tp2pp2")
def copy_made_before_the_mesh() -> Any:
    return averaged("setup", lambda module: copy.deepcopy(module.net).double())


@CASES.add(equal="pp2 zero1tp2", large="tp2 zero3 tp2pp2")
def averaged_model_made_before_the_mesh() -> Any:
    average = get_ema_multi_avg_fn(0.9)
    return averaged("setup", lambda m: AveragedModel(m.net, multi_avg_fn=average).double())


@CASES.add(equal="pp2 zero1tp2", large="tp2 zero1 zero3 tp2pp2")
def noise_and_bounds_on_weights() -> Any:
    class Module(PlainModule):
        @torch.no_grad()
        def on_train_batch_end(self, *_: Any) -> None:
            draws = torch.Generator().manual_seed(self.trainer.global_step)
            for p in self.parameters():
                p.add_(torch.randn(p.shape, generator=draws, dtype=p.dtype), alpha=0.01)
                p.add_(torch.randn_like(p), alpha=0.01)
                p.add_(torch.bernoulli(torch.full_like(p, 0.2)), alpha=0.01)
                if p.ndim > 1:
                    p.mul_((1.0 / p.norm(dim=1, keepdim=True)).clamp(max=1.0))
                p.data.clamp_(-0.5, 0.5)

    return Module(), token_pairs()


@CASES.add(refused={"tp2": r"ModelPruning replaces .*p\.data\.mul_\(masks\[name\]\)"})
def pruning_by_the_callback() -> Any:
    class Module(PlainModule):
        def configure_callbacks(self) -> Any:
            return [ModelPruning("l1_unstructured", amount=0.3)]

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3")
def masks_on_weights() -> Any:
    """The cure of the refusal above."""

    class Module(PlainModule):
        def on_train_start(self) -> None:
            self.masks = {n: p.detach().abs() > 0.02 for n, p in self.named_parameters()}

        def on_train_batch_end(self, *_: Any) -> None:
            for name, p in self.named_parameters():
                p.data.mul_(self.masks[name])

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2 zero1 tp2pp2")
def forwards_between_steps() -> Any:
    def number(module: PlainModule) -> Any:
        tokens = torch.arange(8).view(2, 4)
        with torch.no_grad():
            for _ in range(2):
                ahead = module.net(tokens)[:, -2:].argmax(-1)
                tokens = torch.cat([tokens, ahead], 1)
            return module.net(tokens).pow(2).mean() + tokens.sum() / 100

    return with_hook("on_train_batch_end", number)


@CASES.add(equal="pp2 zero1", large="tp2 zero3 tp2pp2 pp2_interleaved", strategy={"verify": False})
def averages_that_are_loaded_for_a_while() -> Any:
    """Weights are kept, averages loaded, a number taken of them, and the weights loaded again."""

    class Module(PlainModule):
        def on_train_start(self) -> None:
            state = self.net.state_dict()
            self.averages = {name: value.clone() for name, value in state.items()}

        def on_train_batch_end(self, *_: Any) -> None:
            state = self.net.state_dict()
            for name, value in state.items():
                self.averages[name].lerp_(value, 0.5)
            kept = {name: value.clone() for name, value in state.items()}
            self.net.load_state_dict(state_dict=self.averages)
            rate_of(self, sum(p.detach().double().square().sum() for p in self.parameters()) / 1e3)
            loaded = self.net.load_state_dict(kept, strict=False)
            assert not loaded.missing_keys

    return Module(), token_pairs()


@CASES.add(
    refused={"pp2": r"does not fit the model: (missing|unexpected) (emb\.weight|other)"},
    strategy={"verify": False},
)
def a_state_that_does_not_fit() -> Any:
    class Module(PlainModule):
        def on_train_start(self) -> None:
            state = self.net.state_dict()
            self.net.load_state_dict({"other": state.pop("emb.weight"), **state})

    return Module(), token_pairs()


@CASES.add(
    equal="zero0",  # whose replicas run a forward without each other
    refused={
        "tp2 pp2 zero1 zero3": r"different calls .*rank 0: a forward of the model at"
        r" .*Make the calls"
    },
)
def a_forward_on_rank_zero_alone() -> Any:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.is_global_zero:
                with torch.no_grad():
                    self.net(torch.arange(8).view(2, 4))

    return Module(), token_pairs()


def written_before_the_update(array: Callable[[Tensor], Any]) -> Any:
    """Arrays of weights and gradients between backward and step, as for histograms."""

    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found = [(array(p), array(p.grad)) for p in self.parameters() if p.grad is not None]
            assert all(p.shape == grad.shape for p, grad in found)

    return Module(), token_pairs()


@CASES.add(refused={"tp2": r"numpy\(\) is called .*full_tensor\(\)"})
def arrays_of_parts_before_the_update() -> Any:
    return written_before_the_update(lambda t: t.detach().cpu().numpy())


@CASES.add(equal="tp2")
def arrays_of_whole_tensors_before_the_update() -> Any:
    """The cure of the refusal above."""

    def array(t: Any) -> Any:
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().numpy()

    return written_before_the_update(array)


@CASES.add(refused={"tp2 pp2": r"a module of which .*log_graph=False"})
def the_graph_of_the_module() -> Any:
    class Module(PlainModule):
        def forward(self, tokens: Tensor) -> Any:
            return self.net(tokens)

        def on_fit_start(self) -> None:
            torch.jit.trace(self, torch.zeros(2, 4, dtype=torch.long), check_trace=False)

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2")
def hooks_on_gradients_of_all_weights() -> Any:
    class Module(PlainModule):
        def on_fit_start(self) -> None:
            for p in self.parameters():
                p.register_hook(lambda grad: grad * 0.5)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="tp2")
def a_summary_of_example_inputs() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

        def forward(self, tokens: Tensor) -> Any:
            return self.net(tokens)

        def configure_callbacks(self) -> Any:
            return [ModelSummary()]

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
