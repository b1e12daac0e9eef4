"""Faults of evaluation."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant

DP, CP, PP = Layout(dp=2), Layout(cp=2), Layout(pp=2)


@fault(
    "samples-repeated",
    "The sampler repeats the first samples to fill the last batch, and they count twice.",
    "pytorch/pytorch#25162, roboflow/rf-detr#1507, Lightning-AI/pytorch-lightning#2398",
    "dp",
    "evaluation",
    DP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def repeats(healthy: Any) -> Any:
        def deal(batch: Any) -> Any:
            missing = -len(batch["rows"]) % comm.size("dp", "ep")
            more = {n: torch.cat([t, t[:missing]]) for n, t in batch.items()}
            return healthy(more)

        return deal

    plant.swap(plant.trainer, "deal", repeats)


@fault(
    "samples-dropped",
    "The loader drops the last samples, which do not fill a batch on every replica.",
    "areal-project/AReaL#1096, verl-project/verl#78",
    "dp",
    "evaluation",
    DP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def drops(healthy: Any) -> Any:
        def deal(batch: Any) -> Any:
            kept = len(batch["rows"]) // comm.size("dp", "ep") * comm.size("dp", "ep")
            return healthy({n: t[:kept] for n, t in batch.items()})

        return deal

    plant.swap(plant.trainer, "deal", drops)


@fault(
    "mean-of-means-in-evaluation",
    "The metric is the mean over replicas of the means of their labels.",
    "decisionintelligence/TFB#66, verl-project/verl#7467",
    "dp",
    "evaluation",
    DP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def averages(healthy: Any) -> Any:
        def mean(sums: Tensor) -> Tensor:
            own = torch.stack([sums[0] / sums[1], torch.ones(()).double()])
            return healthy(own if comm.size("dp") > 1 else sums)

        return mean

    plant.swap(plant.trainer, "mean", averages)


@fault(
    "metric-of-the-first-replica",
    "The metric is not reduced: what is logged is that of the first replica.",
    "prajdabre/yanmtt#62, neuralmagic/sparseml#818",
    "dp",
    "evaluation",
    DP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm
    plant.swap(
        plant.trainer, "mean", lambda healthy: lambda s: healthy(s * (comm.place["dp"] == 0))
    )


@fault(
    "dropout-while-evaluating",
    "One stage is not told that it evaluates, and drops entries.",
    "own",
    "pp",
    "evaluation",
    PP,
    when="evaluation",
    dropout=0.2,
)
def _(plant: Plant) -> None:
    trainer = plant.trainer

    def trains(healthy: Any) -> Any:
        def deal(batch: Any) -> Any:
            trainer.model.train(trainer.comm.place["pp"] == 1)
            return healthy(batch)

        return deal

    plant.swap(trainer, "deal", trains)


@fault(
    "labels-divided-by-own-tokens-in-evaluation",
    "Context-parallel ranks divide by the labels of their own tokens.",
    "modelscope/ms-swift#9380",
    "cp",
    "evaluation",
    CP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    comm = plant.trainer.comm

    def averages(healthy: Any) -> Any:
        def mean(sums: Tensor) -> Tensor:
            own = torch.stack([sums[0] / sums[1].clamp(min=1), torch.ones(()).double()])
            return healthy(own if comm.size("cp") > 1 else sums)

        return mean

    plant.swap(plant.trainer, "mean", averages)


@fault(
    "evaluates-on-training-samples",
    "The evaluation reads the training samples: an index was not moved.",
    "own",
    "any",
    "evaluation",
    DP,
    when="evaluation",
)
def _(plant: Plant) -> None:
    data = plant.trainer.data

    def first(_: Any) -> Any:
        return lambda: {"rows": data.rows[:13], "prompts": data.prompts[:13]}

    plant.swap(data, "held_out", first)
