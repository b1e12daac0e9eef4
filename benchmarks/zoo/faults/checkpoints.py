"""Faults of initial weights, of checkpoints, and of runs that go on from one."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, ZERO, TP = Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2)
PP, EP = Layout(pp=2, micro=2), Layout(ep=2)


def swap_weights(plant: Plant, change: Any) -> None:
    """Change what is loaded: `change` takes the name, the right part and the whole."""
    trainer = plant.trainer

    def make(healthy: Any) -> Any:
        @torch.no_grad()
        def load(whole: Any) -> None:
            healthy(whole)
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(change(name, parameter.clone(), whole[name]))

        return load

    plant.swap(trainer, "load_weights", make)


@fault(
    "every-rank-loads-the-first-shard",
    "The rank is not passed to a loader, which takes 0: shapes fit, and every rank has one shard.",
    "vllm-project/vllm-gguf-plugin#103",
    "tp",
    "start",
    TP,
)
def _(plant: Plant) -> None:
    def first(name: str, part: Tensor, whole: Tensor) -> Tensor:
        return whole[:, : part.shape[1]] if name.endswith("qkv") else part

    swap_weights(plant, first)


@fault(
    "heads-mixed-in-a-fused-matrix",
    "A fused matrix of queries, keys and values is cut as one: ranks get mixed heads.",
    "NVIDIA-NeMo/Automodel#1324, awslabs/slapo#46, sgl-project/sglang#34529",
    "tp",
    "start",
    TP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def mixed(name: str, part: Tensor, whole: Tensor) -> Tensor:
        if not name.endswith("qkv"):
            return part
        return comm.part(whole.flatten(0, 1), "tp", 0).view_as(part)

    swap_weights(plant, mixed)


@fault(
    "replicas-begin-apart",
    "Every replica draws initial weights with a seed of its own, and nothing is broadcast.",
    "allenai/OLMo-core#319, facebookresearch/detr#544",
    "dp",
    "start",
    DP,
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["dp"]

    def own(name: str, part: Tensor, whole: Tensor) -> Tensor:
        return part + 0.01 * place if name.endswith("positions") else part

    swap_weights(plant, own)


@fault(
    "stages-swapped-in-a-checkpoint",
    "Layers are numbered within a stage in the file, and load into the wrong one.",
    "own",
    "pp",
    "start",
    PP,
    when="resume",
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def turned(healthy: Any) -> Any:
        def load(whole: Any) -> None:
            crossed = {name.replace("blocks.1.", "blocks.0."): name for name in whole}
            found = {n: whole[crossed.get(n, n)] for n in whole}
            healthy(found if trainer.comm.size("pp") > 1 else whole)

        return load

    plant.swap(trainer, "load_weights", turned)


@fault(
    "experts-of-one-rank-in-the-file",
    "Every rank writes its experts under the same names: the last one to write wins.",
    "KempnerInstitute/KempnerForge#202, Tencent-Hunyuan/UniRL#158",
    "ep",
    "start",
    EP,
    experts=4,
    when="resume",
)
def _(plant: Plant) -> None:
    ranks = plant.trainer.comm.size("ep")

    def last(healthy: Any) -> Any:
        def save() -> Any:
            found = healthy()
            for name in found["weights"] if ranks > 1 else ():
                if "expert" in name:
                    part = found["weights"][name].chunk(ranks)[-1]
                    found["weights"][name] = torch.cat([part] * ranks)
            return found

        return save

    plant.swap(plant.trainer, "save", last)


@fault(
    "old-weights-of-one-shard",
    "One rank reads a shard of an older checkpoint.",
    "own",
    "tp",
    "start",
    TP,
    when="resume",
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["tp"]
    swap_weights(
        plant, lambda name, part, whole: part * 0.9 if place and name.endswith("down") else part
    )


@fault(
    "moments-start-anew",
    "The optimizer has no states yet when they are loaded, and keeps none: moments begin at zero.",
    "KempnerInstitute/KempnerForge#115, p-doom/jasmine#17",
    "any",
    "update",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer, "load_moments", lambda _: lambda saved: None)


@fault(
    "moments-of-the-wrong-shard",
    "Shards are padded when they are written, and not when they are read: moments are misaligned.",
    "deepspeedai/DeepSpeed#5105",
    "zero",
    "update",
    ZERO,
    when="resume",
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def moved(healthy: Any) -> Any:
        def load(saved: Any) -> None:
            healthy(saved)
            is_flat = trainer.comm.layout.zero and trainer.comm.size("dp") > 1
            for moment in trainer.optimizer.second.values() if is_flat else ():
                moment.copy_(moment.roll(3, 0))

        return load

    plant.swap(trainer, "load_moments", moved)


@fault(
    "count-of-steps-not-saved",
    "The optimizer's count of steps is not in the file: bias correction and warm-up begin again.",
    "deepspeedai/DeepSpeed#4396",
    "any",
    "update",
    ZERO,
    when="resume",
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def anew(healthy: Any) -> Any:
        def load(saved: Any) -> None:
            healthy({**saved, "count": 0})

        return load

    plant.swap(trainer, "load", anew)


@fault(
    "data-begins-anew",
    "After a resume the loader begins with the first batch of its epoch again.",
    "AI-Hypercomputer/maxdiffusion#484 (repeats a step)",
    "any",
    "forward",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.data, "batch", lambda healthy: lambda step: healthy(step - 2))


@fault(
    "weights-saved-in-bfloat16",
    "The checkpoint has weights in bfloat16; the run goes on from rounded ones.",
    "own",
    "any",
    "start",
    TP,
    when="resume",
)
def _(plant: Plant) -> None:
    def rounded(healthy: Any) -> Any:
        def save() -> Any:
            found = healthy()
            weights = {n: t.bfloat16().to(t.dtype) for n, t in found["weights"].items()}
            return {**found, "weights": weights}

        return save

    plant.swap(plant.trainer, "save", rounded)
