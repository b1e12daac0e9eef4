"""`strategy.whole()`: hooks get the whole module, and what they write to it is kept."""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from lightning_par.strategies.setup.parallel_model import ParallelModel
from tests.distributed.user_code.test_hooks import rate_of
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, run_ranks
from tests.support.user_code import Cases, strategy_of

CASES = Cases(__name__)
EVERY = "tp2 pp2 zero3"
LARGE = "tp2pp2 zero1 zero2_offload pp2_interleaved"


class Scaled(PlainNet):
    """Blocks whose inputs are scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.linspace(0.5, 1.0 + number, 32))
            block.register_forward_pre_hook(lambda block, args: args[0] * block.scale)


def whole(module: PlainModule, *part: Any, **options: Any) -> Any:
    """As a user writes it who trains without a mesh, too."""
    found = getattr(module.trainer.strategy, "whole", None)
    return nullcontext(*part or (module,)) if found is None else found(*part, **options)


def in_hook(name: str, act: Callable[[Any], Any], *, net: Any = None) -> Any:
    """A hook whose number, if it gives one, sets the rate."""

    class Module(PlainModule):
        pass

    def hook(module: PlainModule, *_: Any) -> None:
        number = act(module)
        if number is not None:
            rate_of(module, number)

    setattr(Module, name, hook)
    return Module(net), token_pairs()


@CASES.add(equal=EVERY, large=LARGE)
def an_average_by_hand() -> Any:
    def update(module: Any) -> Any:
        with torch.no_grad(), whole(module) as net:
            if not hasattr(module, "average"):
                object.__setattr__(module, "average", copy.deepcopy(net.net))
            for mine, p in zip(module.average.parameters(), net.net.parameters(), strict=True):
                assert type(p) is nn.Parameter
                assert p.grad is None or net.trainer.world_size == 1
                mine.lerp_(p, 0.1)
            state = {name: value.clone() for name, value in module.average.state_dict().items()}
        return sum(float(value.norm()) for value in state.values())

    return in_hook("on_train_batch_end", update)


@CASES.add(equal=EVERY, large=LARGE)
def pruning_by_magnitude() -> Any:
    def prune(module: Any) -> None:
        with torch.no_grad(), whole(module, module.net) as net:
            weights = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
            bound = torch.cat([w.abs().flatten() for w in weights]).quantile(0.3)
            for w in weights:
                w.mul_(w.abs() > bound)
            assert net.blocks[0].mlp.up.weight.shape == (48, 32)

    return in_hook("on_train_batch_end", prune)


@CASES.add(equal=EVERY, large=LARGE)
def pruning_on_rank_zero() -> Any:
    """One rank writes; in a hook before the update, in which gradients stay what they were."""

    def prune(module: Any) -> None:
        with torch.no_grad(), whole(module, module.net.blocks[1], on="rank 0") as block:
            if block is not None:
                weight = block.mlp.down.weight
                weight.data = weight.data * (weight.data.abs() > 0.05)
                block.norm.bias += 0.01

    return in_hook("on_before_optimizer_step", prune)


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2 zero1")
def samples_on_rank_zero() -> Any:
    """A text is drawn on one rank; later draws, for all ranks, are those of one process."""

    def sample(module: Any) -> Any:
        with torch.no_grad(), whole(module, on="rank 0") as net:
            if net is not None:
                net.eval()
                tokens = torch.arange(8).view(2, 4)
                for _ in range(3):
                    chances = net.net(tokens)[:, -1].softmax(-1)
                    tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
                net.train()
        assert module.training
        assert module.net.training
        with torch.no_grad():
            for _, p in module.named_parameters():
                p.add_(0.01 * torch.rand(()))

    return in_hook("on_train_batch_end", sample)


@CASES.add(equal=EVERY, large=LARGE)
def statistics_of_samples() -> Any:
    """Forwards and backwards inside leave no trace; buffers are those of all blocks."""

    def information(module: Any) -> Any:
        with torch.enable_grad(), whole(module) as net:
            buffers = sum(float(b.sum()) for b in net.buffers())
            plain = net.net if module.trainer.world_size > 1 else copy.deepcopy(net.net)
            plain.zero_grad()
            plain(torch.arange(8).view(2, 4)).pow(2).mean().backward()
            found = sum(float(p.grad.pow(2).sum()) for p in plain.parameters())
        return found + buffers / 1000

    return in_hook("on_after_backward", information, net=Scaled())


@CASES.add(equal=EVERY, large="tp2pp2")
def buffers_that_are_assigned() -> Any:
    def assign(module: Any) -> None:
        with torch.no_grad(), whole(module) as net:
            for block in net.net.blocks:
                block.scale = block.scale * 0.99

    return in_hook("on_train_batch_end", assign, net=Scaled())


@CASES.add(equal=EVERY)
def in_every_hook() -> Any:
    class Module(PlainModule):
        norms = 0.0

        def look(self, *_: Any, **__: Any) -> None:
            with torch.no_grad(), whole(self) as net:
                self.norms += float(torch.stack([p.norm() for p in net.parameters()]).norm())

        def on_train_batch_end(self, *_: Any) -> None:
            self.look()
            rate_of(self, self.norms)

        setup = on_fit_start = on_train_start = on_train_epoch_start = look
        on_train_batch_start = on_before_zero_grad = on_before_backward = look
        on_after_backward = on_before_optimizer_step = on_train_epoch_end = look
        on_train_end = on_fit_end = teardown = look

    return Module(), token_pairs()


@CASES.add(refused={EVERY: r"the ranks wrote different values to 1 .*net\.head\.weight.*LP420"})
def other_values_on_each_rank() -> Any:
    def write(module: Any) -> None:
        with torch.no_grad(), whole(module) as net:
            net.net.head.weight[0, 0] = float(module.global_rank)

    return in_hook("on_train_start", write)


@CASES.add(refused={EVERY: r"rank 0 changed names, shapes or dtypes.*LP420"})
def a_parameter_that_is_added() -> Any:
    def write(module: Any) -> None:
        with whole(module) as net:
            net.net.more = nn.Parameter(torch.ones(1))

    return in_hook("on_train_start", write)


@CASES.add(refused={"tp2 zero3": r"is called inside a step.*on_train_batch_end.*LP420"})
def in_a_step() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with whole(self):
                return super().training_step(batch, batch_idx)

    return Module(), token_pairs()


@CASES.add(
    refused={"tp2": r"in different calls .*rank 0: strategy\.whole\(on='every'\) at test_whole"}
)
def on_one_rank_alone() -> Any:
    def look(module: Any) -> None:
        if module.global_rank == 0:
            with whole(module):
                pass

    return in_hook("on_train_start", look)


class Shadow(nn.Module):
    """Averages of the parameters of a model, in buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.clone().detach().data)

    @torch.no_grad()
    def forward(self, model: nn.Module) -> None:
        self.steps += 1
        decay = min(0.9, (1 + self.steps) / (10 + self.steps))
        shadows = dict(self.named_buffers())
        for name, parameter in model.named_parameters():
            shadow = shadows[name.replace(".", "")].type_as(parameter)
            shadow.sub_((1 - decay) * (shadow - parameter))

    def copy_to(self, model: nn.Module) -> None:
        shadows = dict(self.named_buffers())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(shadows[name.replace(".", "")].data)


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2 zero1")
def averages_in_buffers_of_a_module_that_a_hook_calls() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.shadow = Shadow(self.net)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.shadow(self.net)
            if batch_idx == 1:
                self.kept = [p.clone() for p in self.net.parameters()]
                self.shadow.copy_to(self.net)
            if batch_idx == 2:
                for kept, p in zip(self.kept, self.net.parameters(), strict=True):
                    p.data.copy_(kept.data)

    return Module(), token_pairs()


class Measured(PlainModule):
    """Notes which ranks hold the whole module, and how often a tensor is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Any]()

    def on_train_batch_end(self, *_: Any) -> None:
        for on in ("every", "rank 0"):
            gathered = list[int]()
            plain = ParallelModel.gather_tensors

            def gather(model: Any, gathered: list[int] = gathered, plain: Any = plain) -> Any:
                state = plain(model)
                gathered.append(len(state))
                return state

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ParallelModel, "gather_tensors", gather)
                with whole(self, on=on) as module:
                    held = None if module is None else sum(p.numel() for p in module.parameters())
            self.seen.append((len(gathered), gathered[0] > 0, held))


def _measure(rank: int, world: int, layout: str) -> list[Any]:
    module = Measured()
    trainer = quiet_trainer(devices=world, strategy=strategy_of(layout), max_steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(token_pairs(8), 4))  # type: ignore[arg-type]
    return module.seen


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_what_the_whole_module_costs(layout: str) -> None:
    """One gather, to rank 0; a rank that gets None holds nothing."""
    size = sum(p.numel() for p in PlainModule().parameters())
    first, second = run_ranks(_measure, 2, layout, timeout=120)
    assert first == [(1, True, size), (1, True, size)]
    assert second == [(1, False, size), (1, False, None)]


class Slow(PlainModule):
    """Rank 0 works alone until the other rank has given up."""

    folder = Path()

    def on_train_batch_end(self, *_: Any) -> None:
        with whole(self, on="rank 0") as module:
            last = time.monotonic() + 120
            while module is not None and time.monotonic() < last:
                if (self.folder / "gave up").exists():
                    return
                time.sleep(0.1)


def _wait(rank: int, world: int, folder: Path) -> None:
    module = Slow()
    module.folder = folder
    strategy = strategy_of("tp2", timeout=timedelta(seconds=20))
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=1)
    try:
        trainer.fit(module, torch.utils.data.DataLoader(token_pairs(8), 4))  # type: ignore[arg-type]
    except Exception:
        (folder / "gave up").touch()
        return
    raise AssertionError("it waited for ever")


@pytest.mark.exhaustive  # it waits that long
def test_others_wait_no_longer_than_the_timeout(tmp_path: Path) -> None:
    """The rank that works is named and ended, and the one that waits goes on with an error."""
    with pytest.raises(
        RankError, match=r"(?s)rank 0 \(tp 0\) has been in between steps.*rank 1: ok"
    ):
        run_ranks(_wait, 2, tmp_path, timeout=180, fresh=True)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
