"""Faults in code that one process runs, too: nothing differs, whatever is divided."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.fault import fault, Plant
from benchmarks.zoo.faults.resumes import swap_rate
from benchmarks.zoo.model import Attention, Experts

DP, TP, EP = Layout(dp=2), Layout(tp=2), Layout(ep=2)


@fault(
    "labels-shifted-twice",
    "The collate function shifts labels, and the loss shifts them again, on one process, too.",
    "InternLM/InternLM#318 (asked whether it is so)",
    "any",
    "forward",
    DP,
    is_shared=True,
)
def _(plant: Plant) -> None:
    def twice(healthy: Any) -> Any:
        return lambda batch: [(tokens, labels.roll(-1, 1)) for tokens, labels in healthy(batch)]

    plant.swap(plant.trainer, "divide", twice)


@fault(
    "norms-are-decayed",
    "Weight decay acts on norms and biases, too, on one process as well.",
    "verl-project/verl#5070, ServiceNow/Fast-LLM#545",
    "any",
    "update",
    DP,
    is_shared=True,
)
def _(plant: Plant) -> None:
    optimizer = plant.trainer.optimizer

    def more(healthy: Any) -> Any:
        def direction(name: str) -> Tensor:
            parameter = optimizer.trainer.model.get_parameter(name).detach()
            decay = optimizer.config.decay * parameter if parameter.ndim == 1 else 0.0
            return healthy(name) + decay

        return direction

    plant.swap(optimizer, "direction", more)


@fault(
    "tokens-see-the-next-one",
    "The causal mask is off by one, and every token sees its label, on one process as well.",
    "own",
    "any",
    "forward",
    TP,
    is_shared=True,
)
def _(plant: Plant) -> None:
    def wider(healthy: Any, part: Any) -> Any:
        def later(q: Tensor, k: Tensor) -> Tensor:
            found = healthy(q, k)
            return torch.cat([found[:, :1], found[:, :-1]], 1)

        return later

    plant.swap(Attention, "later", wider)


@fault(
    "balance-without-its-coefficient",
    "The coefficient of the loss that balances experts is read as a flag, and never multiplied.",
    "NVIDIA-NeMo/Automodel#1408, second bug",
    "any",
    "forward",
    EP,
    experts=4,
    is_shared=True,
)
def _(plant: Plant) -> None:
    coefficient = plant.trainer.config.balance
    plant.swap(
        Experts, "measure_balance", lambda healthy, _: lambda o, c: healthy(o, c) / coefficient
    )


@fault(
    "schedule-made-after-the-optimizer",
    "The schedule is made after the optimizer was loaded, and sets its first rate, on one process "
    "as well.",
    "torch-points3d/torch-points3d#630, ultralytics/yolov5#292",
    "any",
    "update",
    TP,
    when="resume",
    is_shared=True,
)
def _(plant: Plant) -> None:
    swap_rate(plant)
