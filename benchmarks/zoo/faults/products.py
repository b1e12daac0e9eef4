"""Faults that act only where two axes meet."""

from typing import Any

from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant
from benchmarks.zoo.faults.backward import swap_sum
from benchmarks.zoo.model import Experts

DP_TP = Layout(dp=2, tp=2)


def _both(plant: Plant, *axes: str) -> bool:
    return all(axis in plant.trainer.comm.layout.axes for axis in axes)


@fault(
    "norms-summed-over-one-group-only",
    "Where sequence parallelism meets replicas, gradients of norms are added up over these only.",
    "pytorch/pytorch#190627 (two-axis reduction), NVIDIA/Megatron-LM#7452, row 11",
    "dp x sequence",
    "backward",
    Layout(dp=2, tp=2, sequence=True),
)
def _(plant: Plant) -> None:
    if _both(plant, "dp", "sequence"):
        swap_sum(plant, "tp", lambda plain, name, x: x if "norm" in name else plain(x, "tp"))


@fault(
    "wrong-group-of-replicas",
    "With tensor parallelism the group of replicas is made of neighbors: gradients of copies are "
    "added up over the wrong ranks.",
    "NVIDIA/Megatron-LM#7452, row 4 (wrong group)",
    "dp x tp",
    "backward",
    DP_TP,
)
def _(plant: Plant) -> None:
    if _both(plant, "dp", "tp"):
        swap_sum(plant, "dp", lambda plain, name, x: plain(x, "tp"))


@fault(
    "context-ranks-left-out-of-the-label-count",
    "Labels are counted over replicas, not over context-parallel ranks.",
    "modelscope/ms-swift#9380, NVIDIA/Megatron-LM#779",
    "dp x cp",
    "forward",
    Layout(dp=2, cp=2),
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def fewer(healthy: Any) -> Any:
        def count(parts: Any) -> Tensor:
            own = sum((y >= 0).sum() for _, y in parts)
            return comm.sum(own, "dp") * comm.size("cp")

        return count

    if _both(plant, "dp", "cp"):
        plant.swap(plant.trainer, "count_labels", fewer)


@fault(
    "experts-reduced-over-all-replicas",
    "Where experts are shared and there are replicas, their gradients are averaged over both.",
    "deepspeedai/DeepSpeed#5259, databricks/megablocks#86",
    "dp x ep",
    "backward",
    Layout(dp=2, ep=2),
    experts=4,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def less(healthy: Any) -> Any:
        def reduce(name: str, grad: Tensor) -> Tensor:
            return healthy(name, grad / 2 if "expert" in name else grad)

        return reduce

    if _both(plant, "dp", "ep"):
        plant.swap(trainer, "reduce", less)


@fault(
    "tied-table-not-summed-with-zero",
    "With ZeRO a pipeline's tied table is not added up: its shards have no name that is known.",
    "NVIDIA/Megatron-LM#6500, own",
    "pp x zero",
    "backward",
    Layout(pp=2, dp=2, zero=True, micro=2),
)
def _(plant: Plant) -> None:
    if _both(plant, "pp", "zero"):
        swap_sum(plant, "pp", lambda plain, name, x: x)


@fault(
    "synchronized-on-one-stage-only",
    "Only the last stage knows its last backward: with a pipeline, other stages never reduce.",
    "huggingface/picotron#5",
    "dp x pp",
    "backward",
    Layout(pp=2, dp=2, micro=2),
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["pp"]
    if _both(plant, "dp", "pp"):
        swap_sum(plant, "dp", lambda plain, name, x: x if place == 0 else plain(x, "dp"))


@fault(
    "router-scaled-by-both",
    "The balance of experts is multiplied by tensor-parallel ranks only with sequence parallelism "
    "and shared experts.",
    "NVIDIA/Megatron-LM#5047, own",
    "ep x sequence",
    "forward",
    Layout(ep=2, tp=2, sequence=True),
    experts=4,
)
def _(plant: Plant) -> None:
    if _both(plant, "ep", "sequence"):
        plant.swap(Experts, "measure_balance", lambda healthy, _: lambda o, c: healthy(o, c) * 2)


@fault(
    "context-ranks-reduced-after-zero",
    "Context-parallel ranks are added up after gradients were divided: another shard on each.",
    "own",
    "cp x zero",
    "backward",
    Layout(dp=2, cp=2, zero=True),
)
def _(plant: Plant) -> None:
    if _both(plant, "cp", "zero"):
        place = plant.trainer.comm.place["dp"]
        swap_sum(plant, "cp", lambda plain, name, x: plain(x.roll(1 - 2 * place, 0), "cp"))


@fault(
    "norm-counts-shards-of-both",
    "With ZeRO and tensor parallelism copies enter the norm once for each tensor-parallel rank.",
    "NVIDIA-NeMo/RL#3788, own",
    "zero x tp",
    "clip",
    Layout(dp=2, tp=2, zero=True),
)
def _(plant: Plant) -> None:
    def more(healthy: Any) -> Any:
        def copies(name: str) -> int:
            last = name.rpartition(".")[2]
            return healthy(name) // (2 if last in ("norm", "positions") else 1)

        return copies

    if _both(plant, "zero", "tp"):
        plant.swap(plant.trainer, "copies", more)
