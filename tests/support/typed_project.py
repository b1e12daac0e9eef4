"""A user's project, for type checkers: `make types` reads it, nothing runs it.

Each ignored line is wrong: a checker that does not see the mistake calls the comment unused.
"""

from datetime import timedelta

import lightning as L
import torch
from torch import nn

import lightning_par
from lightning_par import (
    attention,
    BatchLayout,
    check_plan,
    ContextOptions,
    Hybrid3DStrategy,
    load_from_checkpoint,
    memory_estimate,
    ParallelPlan,
    ParallelSizes,
    Pipeline1F1BStrategy,
    SequenceRingStrategy,
    TensorParallelStrategy,
    ZeROOffloadStrategy,
)
from lightning_par.callbacks import ActivationCheckpointing, CommunicationProfiler, MemoryMonitor
from lightning_par.models import GPT, GPTConfig, GPTModule, TextDataModule


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="blocks", tensor={"blocks.*": "colwise"}, batch=BatchLayout(labels="y")
        )


def strategies() -> list[lightning_par.strategies.MeshStrategy]:
    return [
        Hybrid3DStrategy(
            tensor_parallel_size=2, pipeline_parallel_size="auto", timeout=timedelta(minutes=5)
        ),
        TensorParallelStrategy(zero_stage=3),
        Pipeline1F1BStrategy(num_microbatches=8),
        SequenceRingStrategy(method="ulysses"),
        ZeROOffloadStrategy(stage=2),
    ]


def run() -> tuple[torch.Tensor, object]:
    trainer = L.Trainer(
        strategy=Hybrid3DStrategy(context_options=ContextOptions(method="ring")),
        callbacks=[ActivationCheckpointing(), CommunicationProfiler(), MemoryMonitor()],
    )
    trainer.fit(GPTModule(preset="tiny"), TextDataModule(length=64))
    gpt: GPT = GPT(GPTConfig.preset("tiny"))
    check_plan(gpt, gpt.parallel_plan(), ParallelSizes(tensor=2))
    found: torch.Tensor = attention(*torch.ones(3, 1, 1, 1, 1).unbind())
    return found, (memory_estimate(gpt, Hybrid3DStrategy()), load_from_checkpoint)


def mistakes() -> None:
    Hybrid3DStrategy(zero_stage="three")  # type: ignore[arg-type]
    SequenceRingStrategy(method="star")  # type: ignore[arg-type]
    ParallelPlan(block="blocks")  # type: ignore[call-arg]
    lightning_par.no_such_name  # type: ignore[attr-defined] # noqa: B018
    ParallelSizes(tensor=2).tensor = "two"  # type: ignore[misc, assignment]
