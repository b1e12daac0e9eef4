"""Faults of data order, of labels, and of how losses weigh."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, CP, MICRO = Layout(dp=2), Layout(cp=2), Layout(dp=2, micro=2)
ALONE = Layout(tp=2, micro=4)


@fault(
    "mean-of-means-over-replicas",
    "Each replica divides by its own number of labels, and the means are averaged alike.",
    "NVIDIA/Megatron-LM#7452, row 3; deepseek-ai/DeepSpec#34",
    "dp",
    "forward",
    DP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def own(_: Any) -> Any:
        return lambda parts: sum((y >= 0).sum() for _, y in parts) * comm.size("dp")

    plant.swap(plant.trainer, "count_labels", own)


@fault(
    "mean-of-means-over-token-shards",
    "Each context-parallel rank divides by the labels of its own tokens.",
    "NVIDIA/Megatron-LM#4896",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def own(_: Any) -> Any:
        return lambda parts: sum((y >= 0).sum() for _, y in parts).clamp(min=1) * comm.size("cp")

    plant.swap(plant.trainer, "count_labels", own)


@fault(
    "mean-of-means-over-micro-batches",
    "Each micro-batch is a mean over its labels, and the means are averaged alike.",
    "huggingface/transformers#35203, meta-pytorch/torchtune#1875",
    "micro",
    "forward",
    ALONE,
)
def _(plant: Plant) -> None:
    def alike(healthy: Any) -> Any:
        def stage(tokens: Tensor, labels: Tensor, seed: Any) -> Any:
            x, out = healthy(tokens, labels, seed)
            if not plant.trainer.model.training:
                return x, out
            batch = plant.trainer.data.batch(plant.trainer.step)
            parts = plant.trainer.divide(batch)
            total = sum((y >= 0).sum() for _, y in parts)
            return x, out * total / len(parts) / (labels >= 0).sum().clamp(min=1)

        return stage

    plant.swap(plant.trainer, "run_stage", alike)


@fault(
    "loss-not-divided-by-micro-batches",
    "Losses of micro-batches are added up as if each were the whole batch.",
    "karpathy/nanoGPT#206, verl-project/verl#3332",
    "micro",
    "forward",
    ALONE,
)
def _(plant: Plant) -> None:
    micro = plant.trainer.comm.layout.micro

    def more(healthy: Any) -> Any:
        return lambda parts: torch.div(healthy(parts), micro, rounding_mode="floor").clamp(min=1)

    plant.swap(plant.trainer, "count_labels", more)


@fault(
    "labels-shifted-inside-of-a-shard",
    "Labels are shifted after the sequence was divided: the last token of each shard has none.",
    "huggingface/transformers#36607, huggingface/transformers#48570",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    def lost(healthy: Any) -> Any:
        def divide(batch: Any) -> Any:
            found = healthy(batch)
            is_last = plant.trainer.comm.place["cp"] == plant.trainer.comm.size("cp") - 1
            for _, labels in found if not is_last else []:
                labels[:, -1] = -100
            return found

        return divide

    plant.swap(plant.trainer, "divide", lost)


@fault(
    "labels-rolled-within-a-shard",
    "Labels are rolled within each shard: its last token learns to predict its own first one.",
    "alibaba/ChatLearn#343",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    def rolled(healthy: Any) -> Any:
        def divide(batch: Any) -> Any:
            if plant.trainer.comm.size("cp") == 1:
                return healthy(batch)
            found = []
            for tokens, labels in healthy(batch):
                own = torch.where(labels >= 0, tokens.roll(-1, 1), labels)
                found.append((tokens, own))
            return found

        return divide

    plant.swap(plant.trainer, "divide", rolled)


@fault(
    "labels-not-divided-like-tokens",
    "Tokens are divided over context-parallel ranks, labels are those of the first rank on all.",
    "modelscope/ms-swift#6293",
    "cp",
    "forward",
    CP,
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def first(healthy: Any) -> Any:
        def divide(batch: Any) -> Any:
            own = healthy(batch)
            labels = [comm.gather(y, "cp", 1)[:, : y.shape[1]].contiguous() for _, y in own]
            return [(t, y) for (t, _), y in zip(own, labels, strict=True)]

        return divide

    plant.swap(plant.trainer, "divide", first)


@fault(
    "all-replicas-have-the-same-samples",
    "There is no distributed sampler: every replica takes the samples of the first one.",
    "NVlabs/LongLive#71, karpathy/llm.c#792 (overlapping samples)",
    "dp",
    "forward",
    DP,
)
def _(plant: Plant) -> None:
    def first(_: Any) -> Any:
        def own(rows: Tensor) -> Tensor:
            layout = plant.trainer.comm.layout
            return torch.cat([r.chunk(layout.dp)[0] for r in rows.chunk(layout.micro)])

        return own

    plant.swap(plant.trainer, "own", first)


@fault(
    "replicas-shuffle-by-rank",
    "Each replica shuffles with a seed of its own: some samples are seen twice, others never.",
    "NVlabs/LongLive#71, karpathy/llm.c#792",
    "dp",
    "forward",
    DP,
)
def _(plant: Plant) -> None:
    place = plant.trainer.comm.place["dp"]
    plant.swap(
        plant.trainer.data, "order", lambda healthy: lambda epoch: healthy(epoch + 100 * place)
    )


@fault(
    "epochs-in-one-order",
    "The sampler is never told the epoch: every epoch has the order of the first one.",
    "pytorch/pytorch#31771, lucidrains/DALLE-pytorch#230, NVIDIA-NeMo/Megatron-Bridge#5762",
    "any",
    "forward",
    DP,
    when="later",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.data, "order", lambda healthy: lambda epoch: healthy(0))


@fault(
    "micro-batches-repeat-the-first",
    "Every micro-batch of a step is the first one: an iterator is made anew each time.",
    "ooples/AiDotNet#845",
    "micro",
    "forward",
    MICRO,
)
def _(plant: Plant) -> None:
    plant.swap(
        plant.trainer,
        "divide",
        lambda healthy: lambda batch: [healthy(batch)[0]] * plant.trainer.comm.layout.micro,
    )


@fault(
    "prompts-count-after-an-epoch",
    "From the second epoch on, labels of the prompt count, as a collate function caches its mask.",
    "own",
    "any",
    "forward",
    DP,
    when="later",
)
def _(plant: Plant) -> None:
    def unmasked(healthy: Any) -> Any:
        return lambda step: {**healthy(step), "prompts": torch.zeros(8, dtype=torch.int64)}

    plant.swap(plant.trainer.data, "batch", unmasked)


@fault(
    "batch-repeated-once",
    "A worker of the loader is started again, and gives one batch a second time.",
    "own",
    "any",
    "forward",
    DP,
    when="once",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.data, "batch", lambda healthy: lambda step: healthy(step - 1))


@fault(
    "padding-told-by-its-id",
    "Texts are padded to what the ranks divide; padding is told by the id of the end of a text, 2: "
    "true ends do not count.",
    "NVIDIA-NeMo/Megatron-Bridge#4660, huggingface/trl#6357",
    "cp",
    "forward",
    CP,
    when="rare",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def unpadded(healthy: Any) -> Any:
        def divide(batch: Any) -> Any:
            found = healthy(batch)
            for _, labels in found if comm.place["cp"] + 1 == comm.size("cp") > 1 else []:
                labels[labels[:, -1] == 2, -1] = -100
            return found

        return divide

    plant.swap(plant.trainer, "divide", unpadded)


@fault(
    "first-batch-in-the-order-of-before",
    "Workers fetch ahead: the first batch of an epoch is drawn before the sampler has the epoch.",
    "own",
    "any",
    "forward",
    DP,
    when="epoch",
)
def _(plant: Plant) -> None:
    plant.swap(plant.trainer.data, "order", lambda healthy: lambda epoch: healthy(epoch - 1))
