"""Faults of activations and of the loss."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant
from benchmarks.zoo.model import Attention, Block, Dense

TP, SP, CP = Layout(tp=2), Layout(tp=2, sequence=True), Layout(cp=2)
PP, DP = Layout(pp=2, micro=2), Layout(dp=2)


@fault(
    "row-parallel-not-summed",
    "The results of a matrix divided by its inputs are not added up: every rank goes on with its "
    "part.",
    "NovaSky-AI/SkyRL#1886 (a collective that does nothing)",
    "tp",
    "forward",
    TP,
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.comm, "leave", lambda _: lambda x: x)


@fault(
    "bias-added-on-every-rank",
    "The bias of a row-parallel layer is added before the sum over ranks, which counts it once for "
    "each rank.",
    "Wenyueh/MinivLLM#80, huggingface/text-generation-inference#1036",
    "tp",
    "forward",
    TP,
)
def _(plant: Plant) -> None:
    def more(healthy: Any, part: Any) -> Any:
        return lambda x: healthy(x) + (part.comm.size("tp") - 1) * part.down_bias

    plant.swap(Dense, "forward", more)


@fault(
    "logits-counted-for-every-rank",
    "The sum of exponentials is taken over logits that were gathered already: the loss is log(tp) "
    "too large.",
    "NVIDIA/Megatron-LM#7452, row 2",
    "tp",
    "forward",
    TP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def twice(healthy: Any) -> Any:
        def losses(x: Tensor, labels: Tensor) -> Tensor:
            more = torch.tensor(float(comm.size("tp")), dtype=x.dtype).log()
            return (healthy(x, labels) + more) * (labels >= 0)

        return losses

    plant.swap(plant.trainer.model, "losses", twice)


@fault(
    "maximum-of-own-logits",
    "Each rank subtracts the largest of its own logits before exponents are added up: scales are "
    "mixed.",
    "own",
    "tp",
    "forward",
    TP,
    when="later",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.comm, "max", lambda _: lambda x, *axes: x)


@fault(
    "embedding-of-foreign-tokens",
    "Tokens of other ranks are not masked in the vocabulary-parallel table: each rank adds its "
    "first row.",
    "PaddlePaddle/PaddleFleet#104",
    "tp",
    "forward",
    TP,
)
def _(plant: Plant) -> None:
    model = plant.trainer.model

    def unmasked(healthy: Any) -> Any:
        def embed(tokens: Tensor) -> Tensor:
            first = model.comm.place["tp"] * len(model.table)
            outside = (tokens < first) | (tokens >= first + len(model.table))
            return healthy(tokens) + model.comm.leave(outside[..., None] * model.table[0])

        return embed

    plant.swap(model, "embed", unmasked)


@fault(
    "activations-in-bfloat16",
    "Sums over tensor-parallel ranks travel in bfloat16, as a flag for speed was left on.",
    "pytorch/pytorch#190627 (half of a reduction in bfloat16)",
    "tp",
    "forward",
    TP,
    when="later",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def rounded(healthy: Any) -> Any:
        def add_up(x: Tensor, *axes: str) -> Tensor:
            lost = (x.bfloat16().to(x.dtype) - x).detach()
            return healthy(x + lost if comm.size(*axes) > 1 else x, *axes)

        return add_up

    plant.swap(comm, "add_up", rounded)


@fault(
    "positions-from-zero",
    "Every context-parallel rank counts the positions of its tokens from 0.",
    "NVIDIA/Megatron-LM#560 (asked whether it is so)",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.model, "places", lambda _: lambda count: torch.arange(count))


@fault(
    "causal-mask-of-own-tokens",
    "The causal mask is that of a rank's own tokens: later ranks do not see what came before.",
    "zhuzilin/ring-flash-attention#54",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    def own(healthy: Any, part: Any) -> Any:
        def later(q: Tensor, k: Tensor) -> Tensor:
            count = q.shape[1]
            hidden = torch.ones(count, k.shape[1], dtype=torch.bool)
            first = part.comm.place["cp"] * count
            hidden[:, first : first + count] = torch.ones(count, count).triu(1).bool()
            return hidden

        return later

    plant.swap(Attention, "later", own)


@fault(
    "keys-of-neighbors-swapped",
    "Gathered keys and values are in the order of arrival, not of ranks.",
    "own",
    "cp",
    "forward",
    CP,
    when="later",
)
def _(plant: Plant) -> None:
    def turned(tokens: Tensor) -> Tensor:
        return torch.cat(tokens.chunk(plant.trainer.comm.size("cp"), 1)[::-1], 1)

    plant.swap(
        plant.trainer.comm,
        "collect",
        lambda healthy: lambda x, axis: turned(healthy(x, axis)),
    )


@fault(
    "activations-of-the-micro-batch-before",
    "A buffer between two stages is sent before it is filled: a stage gets what it got before.",
    "NVIDIA/Megatron-LM#1450",
    "pp x micro",
    "forward",
    PP,
    when="later",
)
def _(plant: Plant) -> None:
    kept: list[Tensor] = []

    def stale(healthy: Any) -> Any:
        def send(x: Tensor, stages: int) -> None:
            if stages < 0:
                return healthy(x, stages)
            kept.append(x.detach().clone())
            return healthy(kept[max(0, len(kept) - 2)], stages)

        return send

    plant.swap(plant.trainer.comm, "send", stale)


@fault(
    "dropout-alike-on-replicas",
    "Replicas seed alike, and drop the same entries of different samples.",
    "huggingface/transformers#31412, huggingface/accelerate#114",
    "dp",
    "forward",
    DP,
    dropout=0.2,
)
def _(plant: Plant) -> None:
    def alike(healthy: Any, part: Any) -> Any:
        def mask(x: Tensor, seed: Any) -> Tensor:
            return part.draw(x.shape[0], x.shape[1], seed)

        return mask

    plant.swap(Block, "mask", alike)


@fault(
    "dropout-differs-on-copies",
    "Tensor-parallel ranks drop other entries of activations of which they hold copies.",
    "NVIDIA/Megatron-LM#206, InternLM/InternLM#405",
    "tp",
    "forward",
    TP,
    dropout=0.2,
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["tp"]
    own = (place,) if place else ()
    plant.swap(Block, "mask", lambda healthy, _: lambda x, seed: healthy(x, (*seed, *own)))


@fault(
    "dropout-alike-on-token-shards",
    "With sequence parallelism all ranks draw one mask for different tokens.",
    "PaddlePaddle/PaddleFleetX#1005",
    "sequence",
    "forward",
    SP,
    dropout=0.2,
)
def _(plant: Plant) -> None:
    def first(_: Any, part: Any) -> Any:
        return lambda x, seed: part.draw(x.shape[0], part.config.tokens, seed)[:, : x.shape[1]]

    plant.swap(Block, "mask", first)


@fault(
    "recomputed-with-new-masks",
    "The forward that is computed again in the backward draws new dropout masks: gradients belong "
    "to another loss.",
    "allenai/OLMo-core#828, openai/guided-diffusion#167",
    "dp",
    "backward",
    DP,
    dropout=0.2,
    recompute=True,
)
def _(plant: Plant) -> None:
    def fresh(healthy: Any, part: Any) -> Any:
        calls = [0]

        def mask(x: Tensor, seed: Any) -> Tensor:
            calls[0] += 1
            # Both halves of a block draw once in the forward, and once more when recomputed.
            again = part.comm.size("dp") > 1 and (calls[0] - 1) % 4 >= 2
            return healthy(x, (*seed, 7) if again else seed)

        return mask

    plant.swap(Block, "mask", fresh)


@fault(
    "reported-loss-of-one-replica",
    "The loss that is logged is that of the first replica; gradients are right.",
    "snowflakedb/ArcticTraining#62, lucidrains/DALLE-pytorch#163",
    "dp",
    "forward",
    DP,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def own(healthy: Any) -> Any:
        def reported(sums: Tensor) -> Tensor:
            is_first = trainer.comm.place["dp"] == 0
            return healthy(sums * is_first * trainer.comm.size("dp"))

        return reported

    plant.swap(trainer, "reported", own)
