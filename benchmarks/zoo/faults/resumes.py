"""Faults of optimizers, random states, rates and data in a run that goes on from a checkpoint."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import BEGINS, fault, Plant
from benchmarks.zoo.faults.checkpoints import swap_weights
from benchmarks.zoo.model import Block

DP, ZERO, SP = Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2, sequence=True)
PP, EP = Layout(pp=2, micro=2), Layout(ep=2)


def swap_moments(plant: Plant, change: Any) -> None:
    """Change moments after they were loaded: `change` takes those of all names, and the whole."""
    trainer = plant.trainer

    def make(healthy: Any) -> Any:
        def load(saved: Any) -> None:
            healthy(saved)
            change(trainer.optimizer.first, saved["first"])
            change(trainer.optimizer.second, saved["second"])

        return load

    plant.swap(trainer, "load_moments", make)


@fault(
    "random-states-of-the-first-replica",
    "The file has the random state of the first rank only: after a resume all drop the same.",
    "NVIDIA/Megatron-LM#6858, radixark/miles#3187",
    "dp",
    "forward",
    DP,
    when="resume",
    dropout=0.2,
)
def _(plant: Plant) -> None:
    def alike(_: Any, part: Any) -> Any:
        return lambda x, seed: part.draw(x.shape[0], x.shape[1], seed)

    plant.swap(Block, "mask", alike)


@fault(
    "random-states-of-the-first-token-shard",
    "Random states are saved once for each replica: its tensor-parallel ranks resume with one.",
    "NVIDIA-NeMo/Automodel#3437",
    "sequence",
    "forward",
    SP,
    when="resume",
    dropout=0.2,
)
def _(plant: Plant) -> None:
    def first(_: Any, part: Any) -> Any:
        return lambda x, seed: part.draw(x.shape[0], part.config.tokens, seed)[:, : x.shape[1]]

    plant.swap(Block, "mask", first)


@fault(
    "not-gathered-after-a-resume",
    "Each replica loads exact weights of its own shard, and does not gather those of the others.",
    "NVIDIA/Megatron-LM#6920",
    "zero",
    "start",
    ZERO,
    when="resume",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def rounded(name: str, part: Tensor, whole: Tensor) -> Tensor:
        if not comm.layout.zero or comm.size("dp") == 1:
            return part
        pieces = part.flatten().split(-(-part.numel() // comm.size("dp")))
        own = comm.place["dp"]
        held = [p if n == own else p.bfloat16().to(p.dtype) for n, p in enumerate(pieces)]
        return torch.cat(held).view_as(part)

    swap_weights(plant, rounded)


@fault(
    "expert-moments-of-the-first-rank",
    "Only the moments of the experts of the first rank are in the file: shapes fit on every rank.",
    "Tencent-Hunyuan/UniRL#158",
    "ep",
    "update",
    EP,
    experts=4,
    when="resume",
)
def _(plant: Plant) -> None:
    ranks = plant.trainer.comm.size("ep")

    def first(moments: Any, whole: Any) -> None:
        for name in moments:
            if "expert" in name:
                moments[name].copy_(whole[name].chunk(ranks)[0])

    swap_moments(plant, first)


@fault(
    "moments-matched-by-number",
    "States are matched by the number of a parameter, and two norms were listed in another order.",
    "pytorch/pytorch#105958 (says that they are matched by order)",
    "any",
    "update",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    def crossed(moments: Any, whole: Any) -> None:
        for name in moments:
            other = name.replace(".first.norm", ".second.norm")
            if other != name:
                moments[name], moments[other] = moments[other], moments[name]

    swap_moments(plant, crossed)


@fault(
    "moments-of-the-tied-table-lost",
    "The file has the moments of the table once: those of the last stage begin at zero.",
    "own",
    "pp",
    "update",
    PP,
    when="resume",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def lost(moments: Any, whole: Any) -> None:
        if comm.place["pp"]:
            moments["table"].zero_()

    swap_moments(plant, lost)


@fault(
    "moments-without-their-scales",
    "Moments are in 8 bits with a scale for each tensor, and the scales do not come back.",
    "databricks/flashoptim#3",
    "any",
    "update",
    ZERO,
    when="resume",
)
def _(plant: Plant) -> None:
    def bare(moments: Any, whole: Any) -> None:
        for name, moment in moments.items():
            moment.div_(whole[name].abs().max() + 1e-12)

    swap_moments(plant, bare)


@fault(
    "powers-of-other-betas",
    "Powers for the bias correction are computed before the betas of the file are read.",
    "tenstorrent/tt-metal#53212",
    "any",
    "update",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def other(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            found: Tensor = healthy(name)
            return found * (1 - 0.9**optimizer.count) / (1 - 0.95**optimizer.count)

        return direction

    plant.swap(optimizer, "direction", other)


@fault(
    "warm-up-begins-again",
    "The wrapped optimizer does not save its rate: after a resume the warm-up begins again.",
    "hpcaitech/ColossalAI#5151",
    "any",
    "update",
    ZERO,
    when="resume",
)
def _(plant: Plant) -> None:
    swap_rate(plant)


def swap_rate(plant: Plant) -> None:
    """Let the warm-up begin with the first step after a resume."""
    optimizer = plant.trainer.optimizer

    def again(healthy: Any) -> Any:
        def rate() -> float:
            count, optimizer.count = optimizer.count, optimizer.count - BEGINS["resume"]
            found: float = healthy()
            optimizer.count = count
            return found

        return rate

    plant.swap(optimizer, "rate", again)


@fault(
    "order-of-the-first-epoch-after-a-resume",
    "The sampler that is made anew is not told the epoch, and repeats the order of the first one.",
    "modelscope/ms-swift#10050, huggingface/accelerate#4233",
    "any",
    "forward",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.data, "order", lambda healthy: lambda epoch: healthy(0))


@fault(
    "epoch-skipped-after-a-resume",
    "A run that goes on at the end of an epoch takes the next one for done, and skips it.",
    "verl-project/verl#7401",
    "any",
    "forward",
    DP,
    when="resume",
)
def _(plant: Plant) -> None:
    data = plant.trainer.data
    steps = data.SIZE // data.config.samples
    plant.swap(data, "batch", lambda healthy: lambda step: healthy(step + steps))
