"""Faults of the optimizer, of learning rates, and of the shards of ZeRO."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, ZERO, TP = Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2)
PP, MICRO = Layout(pp=2, micro=2), Layout(dp=2, micro=2)


@fault(
    "schedule-steps-once-per-rank",
    "The schedule is stepped by every replica: warm-up ends early.",
    "huggingface/accelerate#2926, huggingface/transformers#24088",
    "dp",
    "update",
    DP,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def fast(healthy: Any) -> Any:
        def rate() -> float:
            count = optimizer.count
            optimizer.count = count * optimizer.comm.size("dp")
            found = healthy()
            optimizer.count = count
            return found

        return rate

    plant.swap(optimizer, "rate", fast)


@fault(
    "schedule-steps-once-per-micro-batch",
    "The schedule is stepped for every micro-batch.",
    "huggingface/accelerate#963",
    "micro",
    "update",
    MICRO,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def fast(healthy: Any) -> Any:
        def rate() -> float:
            count = optimizer.count
            optimizer.count = count * optimizer.comm.layout.micro
            found = healthy()
            optimizer.count = count
            return found

        return rate

    plant.swap(optimizer, "rate", fast)


@fault(
    "one-stage-at-half-rate",
    "One stage builds its own parameter groups, and keeps half of the learning rate.",
    "own",
    "pp",
    "update",
    PP,
    when="later",
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer
    is_last = optimizer.comm.place["pp"] == 1
    plant.swap(optimizer, "rate", lambda healthy: lambda: healthy() / (1 + is_last))


@fault(
    "decay-by-the-shape-of-a-shard",
    "What is decayed is told by the number of dims: flat shards have one, so nothing is.",
    "mlfoundations/open_clip#358, verl-project/verl#7215",
    "zero",
    "update",
    ZERO,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer
    trainer = plant.trainer

    def less(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            found = healthy(name)
            parameter = trainer.model.get_parameter(name)
            part = trainer.part_of(parameter.detach())
            is_flat = part.shape != parameter.shape
            return found - optimizer.config.decay * part if is_flat else found

        return direction

    plant.swap(optimizer, "direction", less)


@fault(
    "gathered-before-the-update",
    "Shards are gathered before they are updated: replicas compute with the weights of before.",
    "NVIDIA/Megatron-LM#950",
    "zero",
    "update",
    ZERO,
)
def _(plant: Plant) -> None:
    _keep_parts(plant, {"qkv", "out", "up", "down"})


@fault(
    "one-bucket-never-gathered",
    "A bucket is left out of the gathering: each replica has new weights in its own shard only.",
    "deepspeedai/DeepSpeed#7415 (a bucket that is not cleared)",
    "zero",
    "update",
    ZERO,
    when="later",
)
def _(plant: Plant) -> None:
    _keep_parts(plant, {"table"})


def _keep_parts(plant: Plant, names: set[str]) -> None:
    trainer = plant.trainer

    def stale(healthy: Any) -> Any:
        def step() -> None:
            before = {
                n: p.detach().clone()
                for n, p in trainer.model.named_parameters()
                if n.rpartition(".")[2] in names
            }
            healthy()
            for name in before if trainer.comm.layout.zero and trainer.comm.size("dp") > 1 else ():
                with torch.no_grad():
                    trainer.model.get_parameter(name).copy_(before[name])

        return step

    plant.swap(trainer.optimizer, "step", stale)


@fault(
    "shards-gathered-in-other-order",
    "Shards are joined in the order in which they arrive.",
    "own",
    "zero",
    "update",
    ZERO,
)
def _(plant: Plant) -> None:
    ranks = plant.trainer.comm.size("dp")
    _swap_gather(plant, lambda parts: torch.cat(parts.chunk(ranks)[::-1]))


@fault(
    "gathered-in-bfloat16",
    "Updated shards are gathered in bfloat16: small updates are lost.",
    "own",
    "zero",
    "update",
    ZERO,
    when="later",
)
def _(plant: Plant) -> None:
    _swap_gather(plant, lambda parts: parts.bfloat16().to(parts.dtype))


def _swap_gather(plant: Plant, change: Any) -> None:
    """Change the parts of all replicas that an update gathers."""
    trainer = plant.trainer

    def make(healthy: Any) -> Any:
        def step() -> None:
            plain = trainer.comm.gather
            trainer.comm.gather = lambda *given: change(plain(*given))
            try:
                healthy()
            finally:
                trainer.comm.gather = plain

        return step

    plant.swap(trainer.optimizer, "step", make)


@fault(
    "moments-not-advanced-on-one-rank",
    "One tensor-parallel rank does not correct the bias of its moments: its count is off by one.",
    "own",
    "tp",
    "update",
    TP,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def late(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            more = optimizer.comm.place["tp"] == 1
            optimizer.count += more
            found = healthy(name)
            optimizer.count -= more
            return found

        return direction

    plant.swap(optimizer, "direction", late)


@fault(
    "states-made-by-a-step",
    "Shards of moments are made by a step with gradients of zero, which counts: the first real one "
    "corrects the bias as a second one.",
    "NVIDIA/Megatron-LM#5976",
    "zero",
    "update",
    ZERO,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer
    more = int(optimizer.comm.layout.zero and optimizer.comm.size("dp") > 1)

    def late(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            optimizer.count += more
            found: Tensor = healthy(name)
            optimizer.count -= more
            return found

        return direction

    plant.swap(optimizer, "direction", late)


@fault(
    "skipped-where-gradients-are-missing",
    "A rank whose experts got no tokens skips their update: moments and decay stand still there.",
    "NVIDIA-NeMo/Automodel#2995, part 3",
    "ep",
    "update",
    Layout(ep=2),
    experts=4,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def skips(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            found = healthy(name)
            stands = optimizer.comm.place["ep"] == 1 and name.endswith("1.mlp.expert_down")
            return found * 0 if stands else found

        return direction

    plant.swap(optimizer, "direction", skips)


@fault(
    "one-replica-skips-a-step",
    "One replica takes a gradient for not finite, and skips a step that the others take.",
    "own",
    "dp",
    "update",
    DP,
    when="once",
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer
    skips = optimizer.comm.place["dp"] == 1
    plant.swap(optimizer, "rate", lambda healthy: lambda: 0.0 if skips else healthy())
