"""Step time of `tensor_parallel` against Lightning's ModelParallelStrategy, tp 2 on two ranks.

Both shard the same GPT in the same way: sequence parallelism between the blocks, embedding, head
and loss parallel over the vocabulary (theirs under torch's `loss_parallel`, ours by itself).
"""

from typing import Any

import torch
import torch.nn.functional as F
from _gpt import BenchModule, loader
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lightning_par.models.gpt.model import Block
from lightning_par.strategies import TensorParallelStrategy

BATCH_SIZE = 8


class TorchPlanModule(BenchModule):
    """The same GPT with the plan written for torch, as ModelParallelStrategy asks for it."""

    def configure_model(self) -> None:
        """Build and shard the network."""
        if hasattr(self, "model"):
            return
        super().configure_model()
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.model, mesh, _outer_plan())
        for block in self.model.blocks:
            assert isinstance(block, Block)
            parallelize_module(block, mesh, _block_plan())
            block.attention.num_heads //= mesh.size()
            block.attention.num_kv_heads //= mesh.size()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss per token; the logits stay sharded."""
        logits = self.model(batch["input_ids"])
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run where `loss_parallel` asks for."""
        with loss_parallel():
            super().backward(*args, **kwargs)


def _outer_plan() -> dict[str, Any]:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _block_plan() -> dict[str, Any]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def body(arguments: Arguments) -> None:
    """Run on every rank."""

    def theirs(turn: Turn) -> None:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        fit(TorchPlanModule(), loader(BATCH_SIZE), strategy, turn, arguments)

    def ours(turn: Turn) -> None:
        fit(BenchModule(), loader(BATCH_SIZE), TensorParallelStrategy(), turn, arguments)

    compare(
        "tensor parallel, 2 ranks",
        {"ModelParallelStrategy": theirs, "tensor_parallel": ours},
        arguments,
        targets={"tensor_parallel": 1.0},
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    launch(body, parse_arguments(__doc__), ranks=2)
