"""What tensor parallelism and ZeRO refuse, and the same module as the refusal advises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from tests.support.cures import Cures
from tests.support.models.plain_language_model import PlainModule, PlainNet

CURES = Cures(__name__)
CASES = CURES.cases


class Bounded(PlainModule):
    """The rows of its embedding have a norm of 1 at most."""

    style = "vocab_embedding"

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured
        self.net.emb.max_norm = None if cured else 1.0

    def parallel_plan(self) -> Any:
        plan = super().parallel_plan()
        return replace(plan, tensor={**plan.tensor, "net.emb": self.style})

    def on_train_batch_end(self, *_: Any) -> None:
        if self.cured:
            weight = self.net.emb.weight
            weight.data.copy_(torch.renorm(weight.data, 2, 0, 1.0))


@CURES.add("LP207", r"'vocab_embedding': .*on_train_batch_end with torch\.renorm", "tp2")
def an_embedding_with_a_bound_on_shards(cured: bool) -> nn.Module:
    return Bounded(cured)


@CURES.add(
    "LP207",
    r"net\.emb .Embedding. changes .*on_train_batch_end .*torch\.renorm",
    "tp2_whole_sequence",
)
def an_embedding_with_a_bound_on_each_rank(cured: bool) -> nn.Module:
    class Module(Bounded):
        style = "replicated"

    return Module(cured)


@CURES.add("LP408", r"step writes to net\.blocks\.0\.mlp\.up\.weight.*on_train_batch_end", "zero3")
def weights_that_the_step_clamps(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def clamp(self) -> None:
            with torch.no_grad():
                for block in self.net.blocks:
                    block.mlp.up.weight.clamp_(-0.1, 0.1)

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if not cured:
                self.clamp()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if cured:
                self.clamp()

    return Module()


@CURES.add(
    "LP207",
    "the step failed while it computed .*'sequence_gather_output'",
    "tp2",
    styles={"net.norm": "sequence_gather_output"},
)
def logits_from_the_embedding(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            h = self.net.emb(x)
            for block in self.net.blocks:
                h = block(h)
            logits = F.linear(self.net.norm(h), self.net.emb.weight)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Module()


class Around(nn.Module):
    """A head whose weight the module around it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


@CURES.add(
    "LP208",
    r"net\.head.* combines a plain tensor with a weight.*sequence_parallel=False.*'replicated'",
    "tp2_whole_sequence",
    styles={"net.head.inner": "replicated"},
)
def weights_that_the_module_around_reads(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net.head = Around()  # type: ignore[assignment]

        def parallel_plan(self) -> Any:
            plan = super().parallel_plan()
            styles = {"net.head.inner": "colwise_gather_output", **plan.tensor}
            del styles["net.head"]
            return replace(plan, tensor=styles)

    return Module()


@CURES.add("LP208", r"combines a plain tensor.*called as block\(x\).*Call the block", "zero3")
def blocks_called_by_the_name_of_their_forward(cured: bool) -> nn.Module:
    class Net(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            for block in self.blocks:
                h = block(h) if cured else block.forward(h)
            return self.head(self.norm(h))

    return Net()


@CURES.add(
    "LP310",
    "(?s)different losses on the 2 tensor-parallel ranks.*'sequence_gather_output'",
    "tp2",
    styles={"net.norm": "sequence_gather_output"},
)
def a_term_of_the_last_activations(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            h = self.net.emb(batch[0])
            for block in self.net.blocks:
                h = block(h)
            return self.net.norm(h).sigmoid().square().mean()

    return Module()


@CURES.add(
    "LP320",
    "gradient of a gradient.*give the head the style 'colwise_gather_output'",
    "tp2_whole_sequence",
    styles={"net.head": "colwise_gather_output"},
)
def a_penalty_on_the_gradient_of_the_loss(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            hidden: list[Tensor] = []
            hook = self.net.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
            logits = self.net(batch[0])
            hook.remove()
            losses = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")
            (slope,) = torch.autograd.grad(losses.sum(), hidden[0], create_graph=True)
            return losses.mean() + slope.square().mean()

    return Module()


@CURES.add("LP317", r"masked_fill_ is an in-place .*masked_fill instead of masked_fill_", "tp2")
def logits_that_are_masked(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            logits = self.net(x)
            hidden = x[..., None] == torch.arange(64)
            masked = (
                logits.masked_fill(hidden, -5.0) if cured else logits.masked_fill_(hidden, -5.0)
            )
            return F.cross_entropy(masked.flatten(0, 1), y.flatten())

    return Module()


@CURES.add("LP915", r"net\.extra has no entries.*requires_grad_\(False\) on it", "zero1")
def a_parameter_without_entries(cured: bool) -> nn.Module:
    net = PlainNet()
    net.extra = nn.Parameter(torch.zeros(0, 32))
    if cured:
        net.extra.requires_grad_(False)
    return net


@CURES.add("LP919", r"net\.head is a lazy module .* Call the model once on a batch before", "zero1")
def a_lazy_head(cured: bool) -> nn.Module:
    torch.manual_seed(0)
    net = PlainNet()
    net.head = nn.LazyLinear(64)
    if cured:
        net.head(torch.zeros(2, 32))
    return net


@CURES.add("LP919", r"net\.norm\.bias has a hook.*p\.grad in on_after_backward", "zero1")
def a_hook_of_a_weight(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            if not cured:
                self.net.norm.bias.register_hook(lambda grad: 0.1 * grad)

        def on_after_backward(self) -> None:
            if cured:
                self.net.norm.bias.grad.mul_(0.1)

    return Module()


@CURES.add(
    "LP919", r"net\.emb\.weight has a hook.*or register the hook on the output of a module", "zero1"
)
def a_hook_of_a_weight_on_an_output(cured: bool) -> nn.Module:
    net = PlainNet()

    def on_output(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: 0.1 * grad)

    if cured:
        net.emb.register_forward_hook(on_output)
    else:
        net.emb.weight.register_hook(lambda grad: 0.1 * grad)
    return net


@CURES.add("LP919", r"net\.emb has sparse=True.*Use sparse=False", "zero1")
def an_embedding_with_sparse_gradients(cured: bool) -> nn.Module:
    net = PlainNet()
    net.emb.sparse = not cured
    return net


@CURES.add("LP919", r"torch\.jit\.script.*Train the module without", "zero1")
def a_scripted_block(cured: bool) -> nn.Module:
    net = PlainNet()
    layer = nn.Linear(32, 32)
    net.blocks[1] = layer if cured else torch.jit.script(layer)
    return net


@CURES.add(
    "LP919", r"net\.norm\.weight is of the class _Marked.*parameter\.no_decay = True", "zero1"
)
def a_weight_marked_by_its_class(cured: bool) -> nn.Module:
    class _Marked(nn.Parameter):
        pass

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            if cured:
                self.net.norm.weight.no_decay = True
            else:
                self.net.norm.weight = _Marked(self.net.norm.weight.data)

        def configure_optimizers(self) -> Any:
            plain = [p for p in self.parameters() if hasattr(p, "no_decay")]
            others = [p for p in self.parameters() if not hasattr(p, "no_decay")]
            return torch.optim.SGD(
                [{"params": plain}, {"params": others, "weight_decay": 0.1}], 0.3
            )

    return Module()


def normalized(layer: nn.Module) -> nn.Module:
    """A net that normalizes the embeddings."""

    class Net(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = layer

        def forward(self, x: Tensor) -> Tensor:
            h = self.statistics(self.emb(x).transpose(1, 2)).transpose(1, 2)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    return Net()


@CURES.add("LP312", r"or use GroupNorm or LayerNorm", "zero1")
def batch_norm_or_group_norm(cured: bool) -> nn.Module:
    return normalized(nn.GroupNorm(4, 32) if cured else nn.BatchNorm1d(32))


@CURES.add("LP312", r"or freeze the layer with eval\(\)", "zero1")
def batch_norm_that_is_frozen(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_epoch_start(self) -> None:
            if cured:
                self.net.statistics.eval()

    return Module(normalized(nn.BatchNorm1d(32)))


@CURES.add("LP416", r"computes lr=0\.2.*lr=0\.1, .* hyperparameter of the module", "zero1")
def a_learning_rate_by_the_number_of_processes(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def configure_optimizers(self) -> Any:
            lr = self.hparams["lr"] if cured else 0.1 * self.trainer.world_size
            return torch.optim.SGD(self.parameters(), lr)

    return Module()


@CURES.add(
    "LP416", r"computes total_iters=2 of a learning-rate.*estimated_stepping_batches", "zero1"
)
def a_schedule_by_the_number_of_processes(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            steps = self.trainer.estimated_stepping_batches
            steps = steps if cured else 4 // self.trainer.world_size
            made = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(made, total_iters=int(steps))
            return [made], [{"scheduler": schedule, "interval": "step"}]

    return Module()


_LEFT_OUT = r"sync_dist=True.*in\s+on_before_optimizer_step, and set every p\.grad = None"


@CURES.add(
    "LP318",
    rf"returned no loss on a replica.*{_LEFT_OUT}",
    "zero1",
    options={"strategy": {"verify": False}},
)
def batches_left_out_by_their_loss(cured: bool) -> nn.Module:
    return LeavesOut(cured)


class LeavesOut(PlainModule):
    """Leaves out batches of a large loss."""

    bound = 4.3

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.cured and float(loss) > self.bound:
            return torch.zeros((), requires_grad=True)  # as None, of which Lightning warns
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.cured and self.trainer.callback_metrics["loss"] > self.bound:
            for p in self.parameters():
                p.grad = None


class Attention(nn.Module):
    """Part of a block that counts its heads, or their features, by itself."""

    def __init__(self, *, by_heads: bool) -> None:
        super().__init__()
        self.by_heads, self.heads = by_heads, 4
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        width = -1 if self.by_heads else 32
        return self.out(found.reshape(batch, length, width))


@CURES.add(
    "LP207",
    r"invalid for input.*heads named in ParallelPlan.divided=.*reshape.b, t, -1. to join",
    "tp2_whole_sequence",
    divided={"net.blocks.*.mlp": ("heads",)},
)
def heads_of_which_a_rank_has_a_part(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            for block in self.net.blocks:
                block.mlp = Attention(by_heads=cured)

        def parallel_plan(self) -> Any:
            plan = super().parallel_plan()
            styles = {n: s for n, s in plan.tensor.items() if not n.endswith(("up", "down"))}
            styles |= {"net.blocks.*.mlp.qkv": "colwise", "net.blocks.*.mlp.out": "rowwise"}
            return replace(plan, tensor=styles)

    return Module()


@CURES.add(
    "LP207",
    r"target.*Give the head the style 'vocab_head'",
    "tp2",
    styles={"net.head": "vocab_head"},
)
def logits_of_a_part_of_the_tokens(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def parallel_plan(self) -> Any:
            plan = super().parallel_plan()
            return replace(plan, tensor={**plan.tensor, "net.head": "sequence_parallel"})

    return Module()


@CURES.add(
    "LP207",
    r"shapes cannot be multiplied.*a head that follows pooling the style 'replicated'",
    "tp2",
    styles={"net.head": "replicated", "net.norm": "sequence_gather_output"},
)
def a_head_behind_a_pool(cured: bool) -> nn.Module:
    class Pooled(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x)
            for block in self.blocks:
                h = block(h)
            out: Tensor = self.head(self.norm(h).mean(1))
            return out

    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1][:, 0])

    return Module(Pooled())


@CURES.add(
    "LP207",
    r"must match the size of tensor.*'split_sequence' position ids of shape \[1, T\]",
    "tp2",
)
def positions_of_a_part_of_the_tokens(cured: bool) -> nn.Module:
    class Placed(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            h = self.emb(x) + self.pos(torch.arange(12)[None if cured else slice(None)])
            for block in self.blocks:
                h = block(h)
            out: Tensor = self.head(self.norm(h))
            return out

    module: Any = PlainModule(Placed())
    module.net.pos, plan = nn.Embedding(12, 32), module.parallel_plan()
    placed = replace(plan, tensor={**plan.tensor, "net.pos": "split_sequence"})
    module.parallel_plan = lambda: placed
    return module


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)
