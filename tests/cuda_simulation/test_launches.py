"""How many kernels a steady step launches, beside plain PyTorch on the same model: 1.15 of them.

Of the whole step, and of what one more block or micro-batch adds to it. Ours has Lightning's loop
and the weights of losses in it, and both have clipping.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.steady import bare_step, steady_step
from tests.support.cuda_simulation.waits import Traffic
from tests.support.models.toy_gpt import ToyLM, ToyModule
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")

RANKS, BATCH_SIZE, MOST = 2, 8, 1.15
MODEL = {"vocab": 20, "tied": False}
OUTER = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
BLOCK = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tensor_parallel(rank: int, world: int, blocks: int, microbatches: int) -> Traffic:
    """Torch's own styles: `parallelize_module`, on DTensors."""
    torch.set_default_dtype(torch.float32)
    model = ToyLM(blocks, **MODEL).cuda()
    mesh = init_device_mesh("cuda", (world,))
    parallelize_module(model, mesh, OUTER)
    for block in model.blocks:
        parallelize_module(block, mesh, BLOCK)
        block.attention.heads //= world
        block.attention.kv_heads //= world

    def step(batch: dict[str, Tensor]) -> None:
        with loss_parallel():
            loss_of(model(batch["ids"]), batch["labels"]).backward()

    return bare_step(list(model.parameters()), BATCH_SIZE, step)


class Stage(nn.Module):
    """Embedding and half of the blocks, or the other half, norm and head."""

    def __init__(self, whole: ToyLM, stage: int) -> None:
        super().__init__()
        half, first = len(whole.blocks) // RANKS, stage == 0
        self.blocks = whole.blocks[stage * half : (stage + 1) * half]
        self.embed, self.position = (whole.embed, whole.position) if first else (None, None)
        self.norm, self.head = (None, None) if first else (whole.norm, whole.head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def pipeline_parallel(rank: int, world: int, blocks: int, microbatches: int) -> Traffic:
    """Torch's own schedule."""
    torch.set_default_dtype(torch.float32)
    module = Stage(ToyLM(blocks, **MODEL), rank).cuda()
    stage = PipelineStage(module, rank, world, torch.device("cuda", torch.cuda.current_device()))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

    def step(batch: dict[str, Tensor]) -> None:
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["labels"], losses=[])

    return bare_step(list(module.parameters()), BATCH_SIZE, step)


def data_parallel(rank: int, world: int, blocks: int, microbatches: int) -> Traffic:
    """FSDP2."""
    torch.set_default_dtype(torch.float32)
    model = ToyLM(blocks, **MODEL).cuda()
    mesh = init_device_mesh("cuda", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(batch: dict[str, Tensor]) -> None:
        loss = loss_of(model(batch["ids"]), batch["labels"])
        dist.all_reduce(loss.detach().clone())
        loss.backward()

    return bare_step(list(model.parameters()), BATCH_SIZE // world, step)


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[..., Traffic], str, tuple[int, int]]] = {
    "tp2": ({"tensor_parallel_size": 2}, tensor_parallel, "block", (6, 1)),
    "pp2": ({"pipeline_parallel_size": 2}, pipeline_parallel, "micro-batch", (4, 8)),
    "zero3": ({"data_parallel_size": 2, "zero_stage": 3}, data_parallel, "block", (6, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_launches_little_more_than_plain_pytorch(name: str) -> None:
    options, plain, unit, larger = LAYOUTS[name]
    smaller = (4, 4 if unit == "micro-batch" else 1)
    launches = []
    for blocks, microbatches in (smaller, larger):
        kind = partial(ToyModule, blocks=blocks, **MODEL)
        given = options | ({"num_microbatches": microbatches} if unit == "micro-batch" else {})
        work = {"batch_size": BATCH_SIZE, "ignored": False}
        ours = run_ranks(steady_step, RANKS, given, kind, timeout=120, **work)
        theirs = run_ranks(plain, RANKS, blocks, microbatches, timeout=120)
        launches.append(
            [(a.launches.total(), b.launches.total()) for a, b in zip(ours, theirs, strict=True)]
        )
    more = sum(larger) - sum(smaller)
    for rank, (few, many) in enumerate(zip(*launches, strict=True)):
        added = [(b - a) / more for a, b in zip(few, many, strict=True)]
        sys.stdout.write(
            f"{name}, rank {rank}: {few[0]} launches, plain {few[1]} ({few[0] / few[1]:.2f}); for "
            f"each {unit} {added[0]}, plain {added[1]} ({added[0] / added[1]:.2f})\n"
        )
        assert few[0] <= MOST * few[1]
        assert added[0] <= MOST * added[1]
