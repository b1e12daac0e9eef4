"""Step time of `hybrid3d` with dp 2 against Lightning's FSDPStrategy (FULL_SHARD), on two ranks.

Both wrap every block and then the rest. ZeRO stage 3 is the like-for-like contender; stage 1 is
there for information.
"""

from functools import partial

import torch
from _gpt import BenchModule, loader
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_par.models.gpt.model import Block
from lightning_par.strategies import Hybrid3DStrategy

BATCH_SIZE = 4


class CPUFSDPStrategy(FSDPStrategy):
    """FSDPStrategy on gloo: the Trainer refuses the class itself on the CPU, and it never tells
    FSDP that the CPU is meant.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def body(arguments: Arguments) -> None:
    """Run on every rank."""

    def theirs(turn: Turn) -> None:
        strategy = CPUFSDPStrategy(
            auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy="FULL_SHARD"
        )
        fit(BenchModule(), loader(BATCH_SIZE), strategy, turn, arguments)

    def ours(zero_stage: int, turn: Turn) -> None:
        strategy = Hybrid3DStrategy(
            tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=zero_stage
        )
        fit(BenchModule(), loader(BATCH_SIZE), strategy, turn, arguments)

    compare(
        "sharded data parallel, 2 ranks",
        {
            "FSDPStrategy": theirs,
            "hybrid3d, zero_stage 3": partial(ours, 3),
            "hybrid3d, zero_stage 1": partial(ours, 1),
        },
        arguments,
        targets={"hybrid3d, zero_stage 3": 1.0},
    )


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=2)
