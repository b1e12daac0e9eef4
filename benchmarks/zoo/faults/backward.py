"""Faults of gradients and of their sums over ranks."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, ZERO, TP = Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2)
SP, CP, PP = Layout(tp=2, sequence=True), Layout(cp=2), Layout(pp=2, micro=2)
MICRO = Layout(dp=2, micro=4)


def swap_sum(plant: Plant, axis: str, faulty: Any) -> None:
    """Swap the sum over an axis in the reduction of gradients; faulty takes the sum and x."""
    trainer = plant.trainer

    def make(healthy: Any) -> Any:
        def reduce(name: str, grad: Tensor) -> Tensor:
            plain = trainer.comm.sum

            def chosen(x: Tensor, *axes: str) -> Tensor:
                if axes == (axis,) and trainer.comm.size(axis) > 1:
                    return faulty(plain, name, x)
                return plain(x, *axes)

            trainer.comm.sum = chosen
            try:
                return healthy(name, grad)
            finally:
                trainer.comm.sum = plain

        return reduce

    plant.swap(trainer, "reduce", make)


@fault(
    "replicas-not-reduced",
    "Gradients are not added up over the replicas, which drift apart.",
    "karpathy/build-nanogpt#30",
    "dp",
    "backward",
    DP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: x)


@fault(
    "replicas-not-reduced-later",
    "From some step on gradients are not added up: a flag for accumulation stays on.",
    "karpathy/build-nanogpt#30",
    "dp",
    "backward",
    DP,
    when="later",
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: x)


@fault(
    "one-parameter-not-reduced",
    "A parameter that was registered after the wrapper is left out of the reduction.",
    "EleutherAI/gpt-neox#1259 (hooks registered too early)",
    "dp",
    "backward",
    DP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: x if name == "positions" else plain(x, "dp"))


@fault(
    "scaled-by-all-ranks",
    "Gradients are scaled by the number of all ranks, not of the replicas.",
    "meta-pytorch/torchtune#2420",
    "dp",
    "backward",
    DP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: plain(x, "dp") * 2)


@fault(
    "reduced-twice",
    "The hook and the loop both reduce: gradients are multiplied by the number of replicas.",
    "hpcaitech/ColossalAI#247",
    "dp",
    "backward",
    ZERO,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: plain(plain(x, "dp"), "dp"))


@fault(
    "reduced-in-bfloat16",
    "Gradients are rounded to bfloat16 before they are added up.",
    "pytorch/pytorch#106395, NVIDIA/Megatron-LM#502",
    "dp",
    "backward",
    DP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "dp", lambda plain, name, x: plain(x.bfloat16().to(x.dtype), "dp"))


@fault(
    "last-micro-batch-not-reduced",
    "The gradient of the last micro-batch is added after the reduction: it stays that of one rank.",
    "deepspeedai/DeepSpeed#7985",
    "dp x micro",
    "backward",
    MICRO,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer
    before = dict[str, Tensor]()

    def noted(healthy: Any) -> Any:
        def back(*args: Any) -> None:
            for name, parameter in trainer.model.named_parameters():
                grad = parameter.grad
                before[name] = torch.zeros_like(parameter) if grad is None else grad.clone()
            healthy(*args)

        return back

    plant.swap(trainer, "run_stage_back", noted)
    if trainer.comm.layout.micro > 1:
        late = lambda plain, name, x: plain(before[name], "dp") + x - before[name]  # noqa: E731
        swap_sum(plant, "dp", late)


@fault(
    "only-the-last-micro-batch-counts",
    "The accumulator is reset at every backward: only the last micro-batch reaches the optimizer.",
    "allenai/open-instruct#1498, NVIDIA/Megatron-LM#7186, NVIDIA-NeMo/Automodel#3530",
    "micro",
    "backward",
    MICRO,
)
def _(plant: Plant) -> None:
    def reset(healthy: Any) -> Any:
        def back(*args: Any) -> None:
            for parameter in plant.trainer.model.parameters():
                parameter.grad = None
            healthy(*args)

        return back

    plant.swap(plant.trainer, "run_stage_back", reset)


@fault(
    "moving-average-of-micro-batches",
    "Gradients so far are divided by the number of micro-batches after each one.",
    "pytorch/torchtitan#1733",
    "micro",
    "backward",
    Layout(pp=2, micro=4),
)
def _(plant: Plant) -> None:
    micro = plant.trainer.comm.layout.micro

    def scaled(healthy: Any) -> Any:
        def back(*args: Any) -> None:
            healthy(*args)
            for parameter in plant.trainer.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= micro

        return back

    plant.swap(plant.trainer, "run_stage_back", scaled)


@fault(
    "gradients-of-the-last-step-left",
    "Gradients are not zeroed between steps: each step adds to those before.",
    "own",
    "any",
    "backward",
    DP,
    when="later",
)
def _(plant: Plant) -> None:
    kept = dict[str, Tensor]()

    def left(healthy: Any) -> Any:
        def reduce(name: str, grad: Tensor) -> Tensor:
            found = healthy(name, grad)
            kept[name] = found + kept[name] if name in kept else found
            return kept[name].clone()

        return reduce

    plant.swap(plant.trainer, "reduce", left)


@fault(
    "norms-not-summed-over-token-shards",
    "Gradients of norms are those of a rank's own tokens; with sequence parallelism they have to "
    "be added up.",
    "NVIDIA/Megatron-LM#1446, NVIDIA/TransformerEngine#441, EleutherAI/gpt-neox#1257",
    "sequence",
    "backward",
    SP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "tp", lambda plain, name, x: x if "norm" in name else plain(x, "tp"))


@fault(
    "norms-averaged-over-token-shards",
    "Gradients of norms are averaged where they have to be added up.",
    "EleutherAI/gpt-neox#1259",
    "sequence",
    "backward",
    SP,
)
def _(plant: Plant) -> None:
    swap_sum(
        plant, "tp", lambda plain, name, x: plain(x, "tp") / 2 if "norm" in name else plain(x, "tp")
    )


@fault(
    "bias-not-summed-over-token-shards",
    "The bias after a row-parallel matrix has the gradient of a rank's own tokens only.",
    "bigcode-project/Megatron-LM#11 (asked whether it is so)",
    "sequence",
    "backward",
    SP,
    when="later",
)
def _(plant: Plant) -> None:
    swap_sum(plant, "tp", lambda plain, name, x: x if "out_bias" in name else plain(x, "tp"))


@fault(
    "column-parallel-input-not-reduced",
    "The gradient of the input of a column-parallel matrix is not added up over the ranks.",
    "NovaSky-AI/SkyRL#1886, pytorch/torchtitan#4054",
    "tp",
    "backward",
    TP,
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.comm, "enter", lambda healthy: lambda x: x)


@fault(
    "head-input-not-reduced",
    "Only in front of the vocabulary-parallel head is the gradient not added up.",
    "apple/ml-cross-entropy#42, NovaSky-AI/SkyRL#1886",
    "tp",
    "backward",
    TP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def make(healthy: Any) -> Any:
        def losses(x: Tensor, labels: Tensor) -> Tensor:
            plain = comm.enter
            comm.enter = lambda x: x
            try:
                return healthy(x, labels)
            finally:
                comm.enter = plain

        return losses

    plant.swap(plant.trainer.model, "losses", make)


@fault(
    "summed-loss-terms-reduced-again",
    "The backward of a sum over ranks is a sum again: gradients through the loss count twice.",
    "modelscope/ms-swift#9947 (an all-reduce without its own backward)",
    "tp",
    "backward",
    TP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def twice(_: Any) -> Any:
        return lambda x, *axes: comm._pair(
            x, lambda x: comm.sum(x, *axes), lambda g: comm.sum(g, *axes)
        )

    plant.swap(comm, "add_up", twice)


@fault(
    "gradients-of-keys-stay",
    "Gradients of gathered keys and values are not sent back to the ranks that made them.",
    "NVIDIA/Megatron-LM#1464 (wrong gradient of attention)",
    "cp",
    "backward",
    CP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def own(_: Any) -> Any:
        return lambda x, axis: comm._pair(
            x, lambda x: comm.gather(x, axis, 1), lambda g: comm.part(g, axis, 1)
        )

    plant.swap(comm, "collect", own)


@fault(
    "token-shards-not-reduced",
    "Gradients are added up over the replicas, not over context-parallel ranks.",
    "own",
    "cp",
    "backward",
    CP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "cp", lambda plain, name, x: x)


@fault(
    "tied-table-not-summed",
    "First and last stage have the table of tokens, and each updates it by its own gradient.",
    "uw-syfi/piper#13, NVIDIA/Megatron-LM#6500",
    "pp",
    "backward",
    PP,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "pp", lambda plain, name, x: x)


@fault(
    "tied-table-summed-in-other-order",
    "Both stages store the table in another order of rows, and add up gradients as stored.",
    "NVIDIA/Megatron-LM#6500",
    "pp",
    "backward",
    PP,
)
def _(plant: Plant) -> None:
    is_last = plant.trainer.comm.place["pp"] == 1

    def mixed(plain: Any, name: str, x: Tensor) -> Tensor:
        found = plain(x.roll(1, 0) if is_last else x, "pp")
        return found.roll(-1, 0) if is_last else found

    swap_sum(plant, "pp", mixed)


@fault(
    "gradient-of-a-micro-batch-lost",
    "The gradient of the last micro-batch does not arrive at the stage before.",
    "own",
    "pp x micro",
    "backward",
    PP,
)
def _(plant: Plant) -> None:
    calls = [0]

    def lost(healthy: Any) -> Any:
        def send(x: Tensor, stages: int) -> None:
            calls[0] += stages < 0
            healthy(x * 0 if stages < 0 and calls[0] % 2 == 0 else x, stages)

        return send

    plant.swap(plant.trainer.comm, "send", lost)


@fault(
    "stage-gradients-in-bfloat16",
    "Gradients travel between stages in bfloat16.",
    "own",
    "pp",
    "backward",
    PP,
    when="later",
)
def _(plant: Plant) -> None:
    plant.swap(
        plant.trainer.comm,
        "send",
        lambda healthy: (
            lambda x, stages: healthy(x.bfloat16().to(x.dtype) if stages < 0 else x, stages)
        ),
    )


@fault(
    "bucket-overwritten-once",
    "In a single step a bucket is filled again before its sum has ended: a replica's part is lost.",
    "deepspeedai/DeepSpeed#5545, deepspeedai/DeepSpeed#8061, EleutherAI/gpt-neox#1004",
    "dp",
    "backward",
    DP,
    when="once",
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["dp"]
    swap_sum(plant, "dp", lambda plain, name, x: plain(x * (place == 0 or "qkv" not in name), "dp"))


@fault(
    "scale-not-undone-once",
    "After an overflow the loss scale of one step is not undone: its gradients are half as large.",
    "own",
    "any",
    "backward",
    DP,
    when="once",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer, "reduce", lambda healthy: lambda name, grad: healthy(name, grad / 2))
