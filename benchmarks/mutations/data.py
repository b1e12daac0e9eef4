"""Faults of data parallelism, ZeRO, gradient accumulation and the optimizer on the host."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.mutations.fault import fault, Switch
from benchmarks.mutations.gradients import own_norm
from benchmarks.mutations.layouts import DDP, LATER, OFFLOAD, ZERO1, ZERO3
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.strategies.step.batch_weights import BatchWeigher, BatchWeights

ACCUMULATES = {"accumulate": 2}
_SINGLE = hasattr(dist, "all_gather_single")  # since torch 2.12
GATHER = "all_gather_single" if _SINGLE else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if _SINGLE else "reduce_scatter_tensor"


def _swap_scatter(switch: Switch, make: Any) -> None:
    """Change the reduce-scatter of gradients, which FSDP2 looks up in `torch.distributed`."""
    swap_collective(switch, SCATTER, make)


def swap_collective(switch: Switch, name: str, make: Any) -> None:
    healthy = getattr(dist, name)

    def chosen(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        given, *args = (kwargs.pop("input"), *args) if "input" in kwargs else args
        if not given.is_floating_point() or not switch.acts():
            return healthy(output, given, *args, **kwargs)
        return make(healthy, output, given, *args, **kwargs)

    setattr(dist, name, chosen)


class _Done:
    def wait(self) -> bool:
        return True


@fault("gradients are not reduced", ZERO3, {}, LATER)
@fault("gradients are not reduced", ZERO1, {}, LATER)
def _(switch: Switch) -> None:
    def own(_: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = given.numel() // output.numel()
        output.view(-1).copy_(given.view(-1).chunk(ranks)[dist.get_rank()])
        return _Done() if kwargs.get("async_op") else None

    _swap_scatter(switch, own)


@fault("gradients are summed, not averaged", ZERO3, {}, LATER)
@fault("gradients are summed, not averaged", ZERO1, ACCUMULATES)
def _(switch: Switch) -> None:
    def doubled(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        return healthy(output, given * 2, *args, **kwargs)

    _swap_scatter(switch, doubled)


@fault("gradients are reduced in bfloat16", ZERO3, {}, LATER)
def _(switch: Switch) -> None:
    def rounded(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        return healthy(output, given.bfloat16().to(given.dtype), *args, **kwargs)

    _swap_scatter(switch, rounded)


@fault("shards of gradients go to the wrong rank", ZERO3)
def _(switch: Switch) -> None:
    def turned(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        return healthy(output, torch.cat(given.chunk(2)[::-1]), *args, **kwargs)

    _swap_scatter(switch, turned)


def _swap_gather(switch: Switch, make: Any) -> None:
    """Change the all-gather of weights."""
    swap_collective(switch, GATHER, make)


@fault("gathered weights are those of the step before", ZERO3, LATER)
def _(switch: Switch) -> None:
    healthy, kept = getattr(dist, GATHER), dict[int, Tensor]()

    def stale(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if given.is_floating_point() and switch.acts() and given.numel() in kept:
            return healthy(output, kept[given.numel()], *args, **kwargs)
        if given.is_floating_point() and given.numel() not in kept:
            kept[given.numel()] = given.clone()
        return healthy(output, given, *args, **kwargs)

    setattr(dist, GATHER, stale)


@fault("shards of weights are gathered in the reverse order", ZERO3, LATER)
def _(switch: Switch) -> None:
    def turned(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = healthy(output, given, *args, **kwargs)
        if work is not None:
            work.wait()
        output.copy_(torch.cat(output.chunk(2)[::-1]))
        return work

    _swap_gather(switch, turned)


@fault("weights are gathered in bfloat16", ZERO3, LATER)
def _(switch: Switch) -> None:
    def rounded(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        return healthy(output, given.bfloat16().to(given.dtype), *args, **kwargs)

    _swap_gather(switch, rounded)


@fault("replicas weigh alike, whatever labels they have", ZERO1, {}, LATER, ACCUMULATES)
@fault("replicas weigh alike, whatever labels they have", DDP)
def _(switch: Switch) -> None:
    def alike(healthy: Any) -> Any:
        def weigh(self: Any, *args: Any, **kwargs: Any) -> BatchWeights:
            found = healthy(self, *args, **kwargs)
            ones = tuple(torch.ones_like(scale) for scale in found.scales)
            return BatchWeights(**{**vars(found), "scales": ones})

        return weigh

    switch.swap((BatchWeigher, "weigh"), alike)


@fault(
    "batches before the last one of a step count twice", ZERO1, when="accumulating", **ACCUMULATES
)
@fault("one replica's loss counts twice", ZERO3, {"rank": 1}, {"rank": 1, **LATER})
def _(switch: Switch) -> None:
    def twice(healthy: Any) -> Any:
        def weigh(self: Any, *args: Any, **kwargs: Any) -> BatchWeights:
            found = healthy(self, *args, **kwargs)
            more = tuple(2 * scale for scale in found.scales)
            return BatchWeights(**{**vars(found), "scales": more})

        return weigh

    switch.swap((BatchWeigher, "weigh"), twice)


@fault("gradients of a step are reduced after its last batch alone", ZERO1, **ACCUMULATES)
def _(switch: Switch) -> None:
    def forgets(healthy: Any) -> Any:
        def before(self: Any, **options: Any) -> None:
            healthy(self, **options)
            if self.synchronizes:
                for unit in self._units:
                    for held in unit._get_fsdp_state()._fsdp_param_group.fsdp_params:
                        held.unsharded_accumulated_grad = None
                        if held.unsharded_param is not None:
                            held.unsharded_param.grad = None

        return before

    switch.swap((Sharding, "before_backward"), forgets)


@fault("the norm for clipping is that of one shard", ZERO3, trainer={"gradient_clip_val": 0.1})
def _(switch: Switch) -> None:
    own_norm(switch)


@fault("one rank takes no steps", DDP, {"rank": 1}, {"rank": 1, **LATER})
@fault("one rank takes no steps", ZERO1, {"rank": 1}, {"rank": 1, **LATER})
def _(switch: Switch) -> None:
    from lightning_par.strategies.step.gradient_path import GradientPath

    def forgets(healthy: Any) -> Any:
        def before(self: Any, parameters: Any) -> None:
            healthy(self, parameters)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

        return before

    switch.swap((GradientPath, "before_step"), forgets)


@fault("gradients of two weights of one shape change places", DDP, {}, LATER)
def _(switch: Switch) -> None:
    from lightning_par.strategies.step.gradient_path import GradientPath

    def swapped(healthy: Any) -> Any:
        def before(self: Any, parameters: Any) -> None:
            healthy(self, parameters)
            held = [p.grad for p in parameters if p.grad is not None and p.ndim == 2]
            one, other = next(
                (a, b) for n, a in enumerate(held) for b in held[n + 1 :] if a.shape == b.shape
            )
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

        return before

    switch.swap((GradientPath, "before_step"), swapped)


@fault("Adam on the host counts its steps from the second one", OFFLOAD)
def _(switch: Switch) -> None:
    import dataclasses

    def late(healthy: Any) -> Any:
        def run(self: Any, update: Any, *args: Any) -> None:
            healthy(self, dataclasses.replace(update, step=update.step + 1), *args)

        return run

    switch.swap((UpdateWorker, "_run_update"), late)


@fault(
    "Adam on the host forgets the factor of clipping", OFFLOAD, trainer={"gradient_clip_val": 0.1}
)
def _(switch: Switch) -> None:
    def whole(healthy: Any) -> Any:
        return lambda self, update, scale, largest: healthy(self, update, 1.0, largest)

    switch.swap((UpdateWorker, "_run_update"), whole)


@fault("Adam on the host leaves a weight out", OFFLOAD, {}, LATER)
def _(switch: Switch) -> None:
    def less(healthy: Any) -> Any:
        def run(self: Any, update: Any, *args: Any) -> None:
            if update.tensors.master.numel() > 1000:
                update.tensors.out.copy_(update.tensors.master)
            else:
                healthy(self, update, *args)

        return run

    switch.swap((UpdateWorker, "_run_update"), less)
