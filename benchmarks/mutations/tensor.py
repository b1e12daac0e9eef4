"""Faults of tensor parallelism."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.mutations.fault import fault, Switch
from benchmarks.mutations.gradients import own_norm, twice
from benchmarks.mutations.layouts import LATER, TP, TP_DP, TP_WHOLE
from lightning_par.engine import collectives
from lightning_par.engine.data.gradient_reduction import is_counted_here, SharedGradients
from lightning_par.engine.tensor import vocab_parallel
from lightning_par.engine.tensor.sequence_parallel import Region
from lightning_par.engine.tensor.styles import _rowwise, _vocab_embedding


@fault("partial outputs are not summed", TP_WHOLE, {}, LATER)
def _(switch: Switch) -> None:
    switch.swap((collectives._ReduceToWhole, "forward"), lambda _: _kept)


def _kept(ctx: Any, x: Tensor, group: Any) -> Tensor:
    ctx.group = group
    return x.clone()


@fault("partial outputs are summed twice", TP_WHOLE)
def _(switch: Switch) -> None:
    def twice(healthy: Any) -> Any:
        return lambda ctx, x, group: healthy(ctx, x, group) * 2

    switch.swap((collectives._ReduceToWhole, "forward"), twice)


@fault("the gradient of the input of column-parallel layers is not summed", TP_WHOLE, {}, LATER)
def _(switch: Switch) -> None:
    switch.swap((collectives._CopyToGroup, "backward"), lambda _: lambda ctx, grad: (grad, None))


@fault("the gradient of the input of column-parallel layers is averaged", TP_WHOLE)
def _(switch: Switch) -> None:
    def mean(healthy: Any) -> Any:
        return lambda ctx, grad: (healthy(ctx, grad)[0] / 2, None)

    switch.swap((collectives._CopyToGroup, "backward"), mean)


@fault("partial outputs are cut along T and not summed", TP, {}, LATER)
def _(switch: Switch) -> None:
    def cut(_: Any) -> Any:
        def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
            ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
            return collectives._shard(x, dim, group)

        return forward

    switch.swap((collectives._ReduceToShards, "forward"), cut)


@fault("the gradient of gathered tokens is cut and not summed", TP, {}, LATER)
def _(switch: Switch) -> None:
    def cut(_: Any) -> Any:
        return lambda ctx, g: (collectives._shard(g, ctx.dim, ctx.group), None, None, None)

    switch.swap((collectives._GatherPartial, "backward"), cut)


@fault("shards of tokens are gathered in the reverse order", TP)
def _(switch: Switch) -> None:
    def turned(healthy: Any) -> Any:
        def gather(x: Tensor, dim: int, *rest: Any, **more: Any) -> Tensor:
            return torch.cat(healthy(x, dim, *rest, **more).chunk(2, dim)[::-1], dim)

        return gather

    switch.swap(collectives.all_gather, turned)


@fault("partial outputs are summed in bfloat16", TP, {}, LATER)
def _(switch: Switch) -> None:
    def rounded(healthy: Any) -> Any:
        return lambda x, dim, group: healthy(x.bfloat16(), dim, group).to(x.dtype)

    switch.swap(collectives.reduce_scatter, rounded)


@fault("gradients of norms are not summed over the shards of tokens", TP, {}, LATER)
def _(switch: Switch) -> None:
    switch.swap((SharedGradients, "reduce"), lambda _: lambda self: None)


@fault("gradients of norms are summed twice", TP)
def _(switch: Switch) -> None:
    switch.swap((SharedGradients, "reduce"), twice)


@fault("gradients of norms are summed over the replicas", TP_DP, world=4)
def _(switch: Switch) -> None:
    def wrong(healthy: Any) -> Any:
        def reduce(self: Any) -> None:
            ranks = torch.distributed.get_process_group_ranks(self.group)
            other = _GROUPS.setdefault("dp", _replicas()) if len(ranks) == 2 else self.group
            healthy(SharedGradients(parameters=self.parameters, group=other))

        return reduce

    switch.swap((SharedGradients, "reduce"), wrong)


_GROUPS: dict[str, Any] = {}


def _replicas() -> Any:
    groups = [torch.distributed.new_group([rank, rank + 2]) for rank in range(2)]
    return groups[torch.distributed.get_rank() % 2]


@fault("the sum of exponentials of the loss is that of one shard", TP)
def _(switch: Switch) -> None:
    def local(healthy: Any) -> Any:
        def forward(ctx: Any, *args: Any) -> Tensor:
            kept = vocab_parallel.all_reduce
            vocab_parallel.all_reduce = lambda x, group, op="sum": (
                kept(x, group, op) if op == "max" else torch.stack([x[0], kept(x, group)[1]])
            )
            try:
                return healthy(ctx, *args)
            finally:
                vocab_parallel.all_reduce = kept

        return forward

    switch.swap((vocab_parallel._VocabParallelNLL, "forward"), local)


@fault("the label's own term is missing in the gradient of the loss", TP)
def _(switch: Switch) -> None:
    def lost(_: Any) -> Any:
        def backward(ctx: Any, grad: Tensor) -> Any:
            softmax = ctx.saved_tensors[0]
            return softmax * grad.unsqueeze(-1), None, None, None, None, None

        return backward

    switch.swap((vocab_parallel._VocabParallelNLL, "backward"), lost)


@fault("ids of other shards look up the first row", TP)
def _(switch: Switch) -> None:
    def unmasked(_: Any) -> Any:
        def lookup(module: Any, call: Any, ctx: Region, args: Any, kwargs: Any) -> Any:
            (ids,) = args or tuple(kwargs.values())
            rows = module._parameters["weight"].shape[0]
            start = rows * ctx.group.rank()
            inside = (ids >= start) & (ids < start + rows)
            return ctx.leave(call(torch.where(inside, ids - start, 0)))

        return lookup

    _swap_style(switch, "vocab_embedding", _vocab_embedding, unmasked)


@fault("the bias is added on every rank", TP, overrides={"bias": True, "norm": "layernorm"})
def _(switch: Switch) -> None:
    def each(_: Any) -> Any:
        return lambda module, call, ctx, args, kwargs: ctx.leave(call(*args, **kwargs))

    _swap_style(switch, "rowwise", _rowwise, each)


def _swap_style(switch: Switch, name: str, healthy: Any, make: Any) -> None:
    from lightning_par.engine.tensor import styles

    table: Any = styles.STYLE_FUNCTIONS
    table[name] = switch._choose(healthy, make(healthy))


@fault("each rank keeps the other's tokens", TP, overrides={"positions": "learned"})
def _(switch: Switch) -> None:
    def other(_: Any) -> Any:
        def shard(x: Tensor, dim: int, group: Any) -> Tensor:
            return x.chunk(2, dim)[1 - group.rank()].contiguous()

        return shard

    switch.swap(collectives._shard, other)


@fault("the norm for clipping is that of one shard", TP, trainer={"gradient_clip_val": 0.1})
def _(switch: Switch) -> None:
    own_norm(switch)


@fault("copies count twice in the norm for clipping", TP, trainer={"gradient_clip_val": 0.1})
def _(switch: Switch) -> None:
    switch.swap(is_counted_here, lambda _: lambda grad: True)


@fault("the shards of a weight are swapped before the first step", TP)
def _(switch: Switch) -> None:
    switch.at_start(lambda _, module: _swap_shards(module))


def _swap_shards(module: Any) -> None:
    """Give each rank the other's rows of a weight that is cut along its output."""
    found = dict(module.named_parameters())
    name = next(n for n in found if "attention" in n and n.endswith("weight"))
    local = found[name].detach().to_local()
    every = [torch.empty_like(local) for _ in range(2)]
    torch.distributed.all_gather(every, local.contiguous())
    local.copy_(every[1 - torch.distributed.get_rank()])


@fault("the optimizer of one rank skips a shard", TP, {"rank": 1}, {"rank": 1, **LATER})
def _(switch: Switch) -> None:
    from lightning_par.strategies.step import gradient_path

    def forgets(healthy: Any) -> Any:
        def before(self: Any, parameters: Any) -> None:
            healthy(self, parameters)
            chosen = next(p for p in parameters if p.grad is not None and p.ndim == 2)
            chosen.grad.zero_()

        return before

    switch.swap((gradient_path.GradientPath, "before_step"), forgets)
