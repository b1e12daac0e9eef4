"""Faults of pipelines, context parallelism and experts."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.mutations.fault import fault, Switch
from benchmarks.mutations.gradients import own_norm, twice
from benchmarks.mutations.layouts import CP, EP, LATER, PP
from lightning_par.engine.context import ring_attention
from lightning_par.engine.context.ring_p2p import KeyValues
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.experts import token_dispatch
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.strategies.step.batch_weights import BatchWeigher, BatchWeights

EXPERTS: dict[str, Any] = {"experts": True}


@fault("micro-batches weigh alike, whatever labels they have", PP, {}, LATER)
@fault("ranks weigh alike, whatever labels they have", CP, {}, LATER)
def _(switch: Switch) -> None:
    def alike(healthy: Any) -> Any:
        def weigh(self: Any, *args: Any, **kwargs: Any) -> BatchWeights:
            found = healthy(self, *args, **kwargs)
            mean = torch.stack(found.scales).sum() / len(found.scales)
            total = torch.ones_like(mean) if len(found.scales) == 1 else mean
            return BatchWeights(**{**vars(found), "scales": (total,) * len(found.scales)})

        return weigh

    switch.swap((BatchWeigher, "weigh"), alike)


@fault("the gradient of the last micro-batch is lost between the stages", PP, {}, LATER)
def _(switch: Switch) -> None:
    def lost(healthy: Any) -> Any:
        def send(self: Any, grads: Any, like: Any) -> None:
            self.count = getattr(self, "count", 0) + 1
            healthy(self, [g * (self.count % 4 != 0) for g in grads], like)

        return send

    switch.swap((Channel, "send_gradients"), lost)


@fault("gradients go between the stages in bfloat16", PP, {}, LATER)
def _(switch: Switch) -> None:
    def rounded(healthy: Any) -> Any:
        return lambda self, grads, like: healthy(
            self, [g.bfloat16().to(g.dtype) for g in grads], like
        )

    switch.swap((Channel, "send_gradients"), rounded)


@fault("activations go between the stages in bfloat16", PP, LATER)
def _(switch: Switch) -> None:
    def rounded(healthy: Any) -> Any:
        def send(self: Any, tensors: Any) -> None:
            healthy(self, [_rounded(t) for t in tensors])

        return send

    switch.swap((Channel, "send_tensors"), rounded)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype) if x.is_floating_point() else x


@fault("a stage gets the activations of the micro-batch before", PP, LATER)
def _(switch: Switch) -> None:
    def stale(healthy: Any) -> Any:
        def send(self: Any, tensors: Any) -> None:
            kept = getattr(self, "kept", tensors)
            self.kept = [t.clone() for t in tensors]
            healthy(self, kept)

        return send

    switch.swap((Channel, "send_tensors"), stale)


@fault("the gradient of the tied table is not summed over the stages", PP, {}, LATER)
@fault("gradients are not summed over the ranks that share a weight", CP, {}, LATER)
def _(switch: Switch) -> None:
    switch.swap((SharedGradients, "reduce"), lambda _: lambda self: None)
    switch.swap((ReplicatedGradients, "reduce"), lambda _: lambda self: None)


@fault("the gradient of the tied table is summed twice", PP)
def _(switch: Switch) -> None:
    switch.swap((SharedGradients, "reduce"), twice)


@fault("the norm for clipping is that of one stage", PP, trainer={"gradient_clip_val": 0.1})
def _(switch: Switch) -> None:
    own_norm(switch)


@fault("the optimizer of one stage takes half of the rate", PP, {"rank": 1}, {"rank": 1, **LATER})
def _(switch: Switch) -> None:
    def halved(trainer: Any, _: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    switch.after_batch(halved)
    switch.at_start(lambda trainer, module: halved(trainer, module) if switch.acts() else None)


@fault("parts of attention are averaged without their weights", CP, {}, LATER)
def _(switch: Switch) -> None:
    def mean(_: Any) -> Any:
        def merge(out: Tensor, logsum: Tensor, part: Tensor, other: Tensor) -> None:
            seen = other.isfinite()[..., None]
            first = logsum.isfinite()[..., None]
            out.copy_(torch.where(seen & first, (out + part) / 2, torch.where(seen, part, out)))
            logsum.copy_(torch.logaddexp(logsum, other))

        return merge

    switch.swap(ring_attention._merge, mean)


@fault("keys and values of the neighbor are left out", CP, {}, LATER)
def _(switch: Switch) -> None:
    def none(_: Any) -> Any:
        return lambda out, logsum, part, other: None

    switch.swap(ring_attention._merge, none)


@fault("gradients of keys and values do not come home", CP, {}, LATER)
def _(switch: Switch) -> None:
    switch.swap((KeyValues, "add"), lambda _: lambda self, other: None)


@fault("positions of each rank begin at 0", CP, {}, LATER)
def _(switch: Switch) -> None:
    def local(healthy: Any) -> Any:
        def shard(self: Any, batch: Any, layout: Any) -> Any:
            found = healthy(self, batch, layout)
            self.positions = torch.arange(self.positions.shape[1])[None]
            return found

        return shard

    switch.swap((SequenceShard, "shard_batch"), local)


@fault("the label at the border of a rank is lost", CP)
def _(switch: Switch) -> None:
    def lost(healthy: Any) -> Any:
        def shard(self: Any, batch: Any, layout: Any) -> Any:
            found = healthy(self, batch, layout)
            found["labels"] = found["labels"].clone()
            found["labels"][:, -1] = -100
            return found

        return shard

    switch.swap((SequenceShard, "shard_batch"), lost)


@fault("a rank holds the tokens of the other one", CP, {"rank": 1})
def _(switch: Switch) -> None:
    def other(healthy: Any) -> Any:
        def shard(self: Any, whole: Tensor, dim: int, padding: float = 0) -> Tensor:
            return healthy(self, whole.roll(1, 0) if whole.shape[0] > 1 else whole, dim, padding)

        return shard

    switch.swap((SequenceShard, "shard_tensor"), other)


@fault("gradients are summed over the ranks that share a sequence, twice", CP)
def _(switch: Switch) -> None:
    switch.swap((ReplicatedGradients, "reduce"), twice)
    switch.swap((SharedGradients, "reduce"), twice)


@fault("answers of experts go to the wrong tokens", EP, {}, LATER, **EXPERTS)
def _(switch: Switch) -> None:
    def turned(healthy: Any) -> Any:
        return lambda self, answers, rows: healthy(self, answers.roll(1, 0), rows)

    switch.swap((token_dispatch._Routes, "unpack"), turned)


@fault("the last rows of each exchange of tokens are dropped", EP, {}, LATER, **EXPERTS)
def _(switch: Switch) -> None:
    def dropped(healthy: Any) -> Any:
        def pack(self: Any, x: Tensor) -> Tensor:
            found = healthy(self, x)
            keep = torch.arange(len(found)) < len(found) - 3
            return found * keep[:, None]

        return pack

    switch.swap((token_dispatch._Routes, "pack"), dropped)


@fault("tokens are sorted by the wrong expert", EP, **EXPERTS)
def _(switch: Switch) -> None:
    def turned(healthy: Any) -> Any:
        def routes(counts: Tensor, group: Any) -> Any:
            found = healthy(counts, group)
            return token_dispatch._Routes(
                by_rank=found.by_rank,
                parts=found.parts,
                by_expert=found.by_expert,
                counts=found.counts.flip(0),
            )

        return routes

    switch.swap(token_dispatch._exact_routes, turned)


@fault("router losses are those of each replica's own tokens", EP, {}, LATER, **EXPERTS)
def _(switch: Switch) -> None:
    from lightning_par.engine.experts import apply

    def own(_: Any) -> Any:
        return lambda x, group: x * 2

    switch.swap(apply.all_reduce, own)
