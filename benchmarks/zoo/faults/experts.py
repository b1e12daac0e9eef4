"""Faults of routers, of the exchange of tokens, and of the losses that balance experts."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant
from benchmarks.zoo.faults.backward import swap_sum
from benchmarks.zoo.model import Experts

EP, DP, TP = Layout(ep=2), Layout(dp=2), Layout(tp=2)
SP, MICRO = Layout(tp=2, sequence=True), Layout(ep=2, micro=2)


@fault(
    "answers-to-the-wrong-tokens",
    "After the exchange rows are put back in the order of arrival.",
    "own",
    "ep",
    "forward",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    def rolled(healthy: Any, part: Any) -> Any:
        return lambda rows: healthy(rows).roll(int(part.comm.size("ep") > 1), 0)

    plant.swap(Experts, "compute", rolled)


@fault(
    "experts-of-the-neighbor",
    "Rows of the second half of the experts go to the ranks of the first half, and the reverse.",
    "vllm-project/vllm-gguf-plugin#103 (every rank takes one shard), own",
    "ep",
    "forward",
    EP,
    experts=4,
    when="later",
)
def _(plant: Plant) -> None:
    def crossed(healthy: Any, part: Any) -> Any:
        def compute(rows: Tensor) -> Tensor:
            ranks = part.comm.size("ep")
            turned = torch.cat(rows.chunk(ranks)[::-1])
            return torch.cat(healthy(turned).chunk(ranks)[::-1])

        return compute

    plant.swap(Experts, "compute", crossed)


@fault(
    "capacity-of-one-rank",
    "The capacity of an expert is divided by the ranks once too often: late tokens fall out.",
    "own",
    "ep",
    "forward",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    def small(healthy: Any, part: Any) -> Any:
        return lambda tokens: max(1, healthy(tokens) // part.comm.size("ep") ** 2)

    plant.swap(Experts, "capacity", small)


@fault(
    "expert-gradients-doubled",
    "Gradients of experts are added up over the ranks that share them, which have them whole.",
    "pytorch/pytorch#160285, deepspeedai/DeepSpeed#5259",
    "ep",
    "backward",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def scaled(healthy: Any) -> Any:
        def reduce(name: str, grad: Tensor) -> Tensor:
            ranks = trainer.comm.size("ep") if "expert" in name else 1
            return healthy(name, grad * ranks)

        return reduce

    plant.swap(trainer, "reduce", scaled)


@fault(
    "router-cut-from-the-loss",
    "Odds travel through a collective without a backward: the router learns from its balance only.",
    "NVIDIA-NeMo/Automodel#2995",
    "ep",
    "backward",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    def cut(healthy: Any, part: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            if part.comm.size("ep") == 1:
                return healthy(x)
            router, plain = part.router, part.measure_balance
            part._parameters["router"] = router.detach()
            part.measure_balance = lambda _, choice: plain((x @ router.T).softmax(-1), choice)
            try:
                return healthy(x)
            finally:
                part._parameters["router"], part.measure_balance = router, plain

        return forward

    plant.swap(Experts, "forward", cut)


@fault(
    "router-not-summed-over-token-shards",
    "With sequence parallelism every rank updates the router by its own tokens.",
    "NVIDIA/Megatron-LM#619, pytorch/torchtitan#2387",
    "sequence",
    "backward",
    SP,
    experts=4,
)
def _(plant: Plant) -> None:
    swap_sum(plant, "tp", lambda plain, name, x: x if "router" in name else plain(x, "tp"))


@fault(
    "balance-lost",
    "The loss that balances experts is computed and logged, and never attached to the graph.",
    "NVIDIA-NeMo/Automodel#1408, NVIDIA-NeMo/Automodel#1412",
    "ep",
    "backward",
    EP,
    experts=4,
)
def _(plant: Plant) -> None:
    def lost(healthy: Any, part: Any) -> Any:
        def measure(odds: Tensor, choice: Tensor) -> Tensor:
            found = healthy(odds, choice)
            return found.detach() if part.comm.size("ep") > 1 else found

        return measure

    plant.swap(Experts, "measure_balance", lost)


@fault(
    "balance-of-own-tokens",
    "Each replica balances the experts over its own tokens, not over those of all.",
    "NVIDIA/Megatron-LM#3768",
    "dp",
    "forward",
    DP,
    experts=4,
)
def _(plant: Plant) -> None:
    def own(_: Any, part: Any) -> Any:
        def measure(odds: Tensor, choice: Tensor) -> Tensor:
            used = torch.bincount(choice.flatten(), minlength=part.count).to(odds.dtype)
            share, mean = used / used.sum(), odds.flatten(0, 1).mean(0)
            return part.count * (share * mean).sum() / part.comm.size("dp", "ep", "cp")

        return measure

    plant.swap(Experts, "measure_balance", own)


@fault(
    "balance-grows-with-tensor-ranks",
    "The loss that balances experts is multiplied by the tensor-parallel ranks.",
    "NVIDIA/Megatron-LM#5047",
    "tp",
    "forward",
    TP,
    experts=4,
)
def _(plant: Plant) -> None:
    def more(healthy: Any, part: Any) -> Any:
        return lambda odds, choice: healthy(odds, choice) * part.comm.size("tp")

    plant.swap(Experts, "measure_balance", more)


@fault(
    "balance-once-per-micro-batch",
    "The loss that balances experts is not divided by the number of micro-batches.",
    "NVIDIA-NeMo/Automodel#3359",
    "micro",
    "forward",
    MICRO,
    experts=4,
)
def _(plant: Plant) -> None:
    def more(healthy: Any, part: Any) -> Any:
        return lambda odds, choice: healthy(odds, choice) * part.comm.layout.micro

    plant.swap(Experts, "measure_balance", more)
