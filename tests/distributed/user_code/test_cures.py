"""What a pipeline refuses, and the same module as the refusal advises, which is equal."""

from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.cures import Cures
from tests.support.models.plain_language_model import PlainModule, PlainNet

CURES = Cures(__name__)
CASES = CURES.cases


class Net(PlainNet):
    """A net whose parts before, around and behind the blocks a case changes."""

    def before(self, x: Tensor) -> Tensor:
        return self.emb(x)

    def call(self, block: nn.Module, h: Tensor) -> Tensor:
        return block(h)

    def behind(self, h: Tensor, x: Tensor) -> Tensor:
        return self.head(self.norm(h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for block in self.blocks:
            h = self.call(block, h)
        return self.behind(h, x)


class TowerBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(32, 32)  # behind the blocks, hence of the last stage

    def before(self, x: Tensor) -> Tensor:
        return self.tower(self.emb(x))


@CURES.add("LP407", r"net\.tower is placed on the last.*first=", first=("net.tower",))
def a_module_behind_the_blocks_used_before_them(cured: bool) -> nn.Module:
    return TowerBefore()


@CURES.add("LP407", r"net\.tower is placed on the last.*replicated=", replicated=("net.tower",))
def a_module_used_before_and_behind_the_blocks(cured: bool) -> nn.Module:
    class Both(TowerBefore):
        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(self.tower(h), x)

    return Both()


@CURES.add("LP407", r"net\.emb\.weight is on another.*replicated=", replicated=("net.emb",))
def a_weight_of_the_first_stage_in_the_head(cured: bool) -> nn.Module:
    class Tied(Net):
        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return F.linear(self.norm(h), self.emb.weight)

    return Tied()


@CURES.add("LP407", r"net\.emb is on another .* shapes .*replicated=", replicated=("net.emb",))
def a_module_of_the_first_stage_that_needs_values(cured: bool) -> nn.Module:
    class Scaled(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + float(self.weight.detach()[0, 0]))

    class Values(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = Scaled(64, 32)

        def before(self, x: Tensor) -> Tensor:
            self.first = self.emb(x)
            return self.first

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(h + self.first, x)

    return Values()


@CURES.add("LP314", r"a module that another pipeline.*replicated=", replicated=("net.emb",))
def values_of_the_first_stage_behind_the_blocks(cured: bool) -> nn.Module:
    class Skips(Net):
        def before(self, x: Tensor) -> Tensor:
            self.first = self.emb(x)
            return self.first

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(h + self.first, x)

    return Skips()


@CURES.add("LP407", r"net\.head is used after the blocks.*last=", last=("net.head",))
def a_head_defined_before_the_blocks(cured: bool) -> nn.Module:
    net = Net()
    children = net._modules
    net._modules = {name: children[name] for name in ("emb", "head", "blocks", "norm")}
    return net


@CURES.add("LP406", "was called twice.*Concatenate the inputs of both")
def two_forwards_in_a_step(cured: bool) -> nn.Module:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            if cured:
                one, other = super().forward(torch.cat([x, x.flip(1)])).chunk(2)
            else:
                one, other = super().forward(x), super().forward(x.flip(1))
            return one + other.flip(1)

    return Twice()


@CURES.add("LP406", "use_reentrant=True.*Pass use_reentrant=False")
def blocks_in_a_reentrant_checkpoint(cured: bool) -> nn.Module:
    class Recomputed(Net):
        def call(self, block: nn.Module, h: Tensor) -> Tensor:
            return checkpoint(block, h, use_reentrant=not cured)

    return Recomputed()


@CURES.add("LP406", r"Call block\(x\) instead")
def blocks_whose_forward_is_called_by_name(cured: bool) -> nn.Module:
    class ByName(Net):
        def call(self, block: nn.Module, h: Tensor) -> Tensor:
            return block(h) if cured else block.forward(h)

    return ByName()


@CURES.add("LP406", "has a backward hook.*on a module inside of the block")
def backward_hooks_of_blocks(cured: bool) -> nn.Module:
    net = Net()
    for block in net.blocks:
        (block.mlp if cured else block).register_full_backward_hook(lambda *_: None)
    return net


@CURES.add("LP406", r"has a backward hook.*output\.register_hook")
def backward_hooks_of_blocks_on_their_outputs(cured: bool) -> nn.Module:
    def halved(grad: Tensor) -> Tensor:
        return grad / 2

    def on_output(block: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(halved)

    net = Net()
    for block in net.blocks:
        if cured:
            block.register_forward_hook(on_output)
        else:
            block.register_full_backward_pre_hook(lambda _, grads: (halved(grads[0]),))
    return net


@CURES.add("LP406", "a bare `except:` around the model call.*write `except Exception:`")
def a_bare_except_around_the_model(cured: bool) -> nn.Module:
    class Careful(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            try:
                return super().training_step(batch, batch_idx)
            except Exception:
                return None
            except BaseException:
                if cured:
                    raise
                return None

    return Careful()


@CURES.add(
    "LP407",
    r"net\.kind returns a tensor of torch\.int64.*that compute its inputs, in .*replicated=",
    replicated=("net.kind", "net.emb"),
)
def a_module_behind_the_blocks_that_gives_integers(cured: bool) -> nn.Module:
    class Kind(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Sequential(nn.Embedding(64, 32))  # type: ignore[assignment]
            children = self._modules
            self.kind = Kind(32, 64)
            self._modules = {n: children[n] for n in ("kind", "emb", "blocks", "norm", "head")}

        def before(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            self.kinds = self.kind(h.detach())
            return h

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            return super().behind(h, x) * (1 + F.one_hot(self.kinds, 64))

    return Masked()


@CURES.add(
    "LP407", r"a hook calls net\.head.*Call the LightningModule or the module that contains all"
)
def a_hook_that_calls_the_head(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                out = self.net(torch.arange(8)[None]) if cured else self.net.head(torch.ones(1, 32))
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(out.square().mean())

    return Module()


@CURES.add("LP407", r"a hook calls net\..*replicated=", replicated=("net.head", "net.norm"))
def a_hook_that_calls_a_replicated_head(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                size = self.net.head(self.net.norm.weight).square().mean()
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(size)

    return Module()


@CURES.add("LP411", r"registers a hook on a tensor.*`if tensor\.requires_grad:`")
def a_hook_on_the_gradient_of_the_logits(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch[0])
            if logits.requires_grad or not cured:
                logits.register_hook(lambda gradient: 0.5 * gradient)
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return Module()


@CURES.add(
    "LP406", r"net\.blocks\.\d is called outside of a step.*the module that contains all blocks"
)
def a_hook_that_calls_the_blocks(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                net: Any = self.net
                tokens = torch.arange(8)[None]
                out = net(tokens) if cured else net.blocks[1](net.blocks[0](torch.ones(1, 2, 32)))
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(out.square().mean())

    return Module()


class Penalized(PlainModule):
    """A loss with a term of its own."""

    def term(self) -> Any:
        return 0.0

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.term()


_ELSEWHERE = "but this parameter is on another pipeline stage"


@CURES.add("LP408", rf"{_ELSEWHERE}.*weight_decay of the optimizer")
def a_penalty_on_all_weights_as_weight_decay(cured: bool) -> nn.Module:
    class Module(Penalized):
        def term(self) -> Any:
            return 0.0 if cured else 0.01 * sum(p.square().sum() for p in self.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.5, weight_decay=0.02 if cured else 0.0)

    return Module()


@CURES.add("LP408", rf"{_ELSEWHERE}.*on_after_backward.*p\.grad\.add_\(p, alpha=\.\.\.\)")
def a_penalty_on_all_weights_in_a_hook(cured: bool) -> nn.Module:
    class Module(Penalized):
        def term(self) -> Any:
            return 0.0 if cured else 0.01 * sum(p.square().sum() for p in self.parameters())

        def on_after_backward(self) -> None:
            for p in self.parameters() if cured else ():
                p.grad.add_(p, alpha=0.02)

    return Module()


@CURES.add(
    "LP408", rf"{_ELSEWHERE}.*a small module on every stage.*replicated=", replicated=("net.emb",)
)
def a_penalty_on_the_embedding(cured: bool) -> nn.Module:
    class Module(Penalized):
        def term(self) -> Any:
            return 0.01 * self.net.emb.weight.square().sum()

    return Module()


class Leaves(nn.Module):
    """A block that also computes a loss of its own."""

    def __init__(self, returns: bool = False) -> None:
        super().__init__()
        self.inner, self.returns = nn.Linear(32, 32), returns

    def forward(self, x: Any) -> Any:
        x, total = x if self.returns else (x, 0.0)
        h = x + torch.tanh(self.inner(x))
        aux = total + h.square().mean((1, 2))
        if self.returns:
            return h, aux
        self.aux = aux
        return h


_KEEPS = r"the code reads the attribute aux of net\.blocks\.0,"


@CURES.add("LP409", rf"{_KEEPS}.*carried=\('aux',\)", carried=("aux",))
def losses_that_blocks_keep(cured: bool) -> nn.Module:
    class Keeping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Leaves() for _ in range(4))

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            total = sum(block.aux for block in self.blocks)
            return super().behind(h, x) * (1 + total[:, None, None])

    return Keeping()


class LeavesLater(Leaves):
    """Has its attribute from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = None


@CURES.add("LP409", rf"{_KEEPS}.*carried=\('aux',\)", carried=("aux",))
def losses_that_blocks_keep_in_the_place_of_none(cured: bool) -> nn.Module:
    class Keeping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(LeavesLater() for _ in range(4))

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            total = sum(block.aux for block in self.blocks)
            return super().behind(h, x) * (1 + total[:, None, None])

    return Keeping()


@CURES.add("LP409", rf"{_KEEPS}.*or let the block return it")
def losses_that_blocks_return(cured: bool) -> nn.Module:
    class Returning(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Leaves(cured) for _ in range(4))

        def before(self, x: Tensor) -> Any:
            h = super().before(x)
            return (h, h.new_zeros(len(h))) if cured else h

        def behind(self, h: Any, x: Tensor) -> Tensor:
            h, total = h if cured else (h, sum(block.aux for block in self.blocks))
            return super().behind(h, x) * (1 + total[:, None, None])

    return Returning()


@CURES.add(
    "LP409", r"a forward hook of .* stores values.*captured={name: entry", captured={"mlp.up": 0}
)
def outputs_that_hooks_collect(cured: bool) -> nn.Module:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            seen: list[Tensor] = []
            self.collected = lambda: seen
            for block in self.blocks:
                block.mlp.up.register_forward_hook(lambda _, __, out: seen.append(out))

        def behind(self, h: Tensor, x: Tensor) -> Tensor:
            seen = self.collected()
            total = sum(out.square().mean((1, 2)) for out in seen)
            seen.clear()
            return super().behind(h, x) * (1 + total[:, None, None])

    return Hooked()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)
