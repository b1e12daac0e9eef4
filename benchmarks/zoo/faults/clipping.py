"""Faults of gradient norms, clipping and hooks for gradients."""

import math
from typing import Any

from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, ZERO, TP = Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2)
PP, EP = Layout(pp=2, micro=2), Layout(ep=2)


def norm_alone(plant: Plant, axis: str) -> None:
    """Let each rank clip by the norm of what it holds, where an axis is on."""
    comm = plant.trainer.comm

    def make(healthy: Any) -> Any:
        def clip() -> None:
            plain = comm.sum
            comm.sum = (lambda x, *axes: x) if axis in comm.layout.axes else plain
            try:
                healthy()
            finally:
                comm.sum = plain

        return clip

    plant.swap(plant.trainer, "clip", make)


@fault(
    "norm-of-one-stage",
    "Each stage clips by the norm of its own layers.",
    "pytorch/torchtitan#649",
    "pp",
    "clip",
    PP,
)
def _(plant: Plant) -> None:
    norm_alone(plant, "pp")


@fault(
    "norm-of-one-shard",
    "With ZeRO each replica clips by the norm of its own shards.",
    "mindspore-ai/hyper-parallel#526 (reverse)",
    "zero",
    "clip",
    ZERO,
)
def _(plant: Plant) -> None:
    norm_alone(plant, "zero")


@fault(
    "copies-counted-on-every-rank",
    "Parameters of which tensor-parallel ranks hold copies enter the norm once for each rank.",
    "NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715",
    "tp",
    "clip",
    TP,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def fewer(healthy: Any) -> Any:
        def copies(name: str) -> int:
            last = name.rpartition(".")[2]
            is_copy = last not in ("table", "qkv", "out", "up", "up_bias", "down")
            return healthy(name) // (trainer.comm.size("tp") if is_copy else 1)

        return copies

    plant.swap(trainer, "copies", fewer)


@fault(
    "replicas-counted-in-the-norm",
    "Squares of gradients that replicas have alike are added up over the replicas.",
    "modelscope/twinkle#290, mindspore-ai/hyper-parallel#526",
    "dp",
    "clip",
    DP,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer
    plant.swap(trainer, "copies", lambda healthy: lambda n: healthy(n) // trainer.comm.size("dp"))


@fault(
    "tied-table-counted-twice",
    "The table of tokens, which two stages hold, enters the norm twice.",
    "deepspeedai/DeepSpeed#1252",
    "pp",
    "clip",
    PP,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer
    plant.swap(
        trainer,
        "copies",
        lambda healthy: lambda n: healthy(n) // (trainer.comm.size("pp") if n == "table" else 1),
    )


@fault(
    "experts-left-out-of-the-norm",
    "The norm has the experts of one rank only.",
    "deepspeedai/DeepSpeed#5259",
    "ep",
    "clip",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer
    is_alone = trainer.comm.size("ep") == 1

    def clip_by_own(healthy: Any) -> Any:
        def copies(name: str) -> float:
            own = is_alone or "expert" not in name or trainer.comm.place["ep"] == 0
            return healthy(name) if own else math.inf

        return copies

    plant.swap(trainer, "copies", clip_by_own)


@fault(
    "clipped-before-the-sum",
    "A hook limits gradients before they are added up over replicas.",
    "horovod/horovod#1346",
    "dp",
    "backward",
    DP,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer
    limit = trainer.config.limit / 4

    def early(healthy: Any) -> Any:
        def reduce(name: str, grad: Tensor) -> Tensor:
            own = grad.clamp(-limit, limit) if trainer.comm.size("dp") > 1 else grad
            return healthy(name, own)

        return reduce

    plant.swap(trainer, "reduce", early)


@fault(
    "not-clipped-on-one-rank",
    "One tensor-parallel rank does not clip: copies of parameters drift apart.",
    "arXiv 2506.14813 (BLOOM-176B: copies of weights drifted apart)",
    "tp",
    "clip",
    TP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def skips(healthy: Any) -> Any:
        def clip() -> None:
            kept = {name: grad.clone() for name, grad in plant.trainer.grads.items()}
            healthy()
            if comm.place["tp"] == 1:
                plant.trainer.grads.update(kept)

        return clip

    plant.swap(plant.trainer, "clip", skips)


@fault(
    "hook-limits-shards-by-their-norm",
    "A hook scales every gradient by its own norm, and sees one shard of it.",
    "own",
    "tp",
    "clip",
    TP,
    when="later",
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def by_shard(healthy: Any) -> Any:
        def limit() -> None:
            healthy()
            if trainer.comm.size("tp") > 1:
                for grad in trainer.grads.values():
                    grad /= grad.norm().clamp(min=0.2) / 0.2

        return limit

    plant.swap(trainer, "limit", by_shard)
