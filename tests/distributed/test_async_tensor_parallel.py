"""Torch's compiler finds the products beside our collectives, and what it makes of them is right.

Its fused operators run on GPUs only. Here each is replaced by the same collective and the same
product one after the other, as torch itself defines it; that they are hidden cannot be seen.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer, Recorder, TOLERANCE
from tests.support.ranks.api import run_ranks

FUSED = {
    torch.ops.symm_mem.fused_all_gather_matmul.default: symmetric._fused_all_gather_matmul_fallback,
    torch.ops.symm_mem.fused_matmul_reduce_scatter.default: (
        symmetric._fused_matmul_reduce_scatter_fallback
    ),
}
found: Counter[str] = Counter()


def fuse(graph: fx.GraphModule, _: Any) -> Any:
    """Compile as torch's own backend does with ``_micro_pipeline_tp``, but for CPUs."""
    view_to_reshape(graph)
    # The pass asks for NCCL, and for a group that was named.
    with symmetric._test_mode(), patch.object(dist, "is_nccl_available", return_value=True):
        micro_pipeline_tp_pass(graph.graph)
    for node in graph.graph.nodes:
        if node.target in FUSED:
            found[node.target._schema.name.removeprefix("symm_mem::")] += 1
            node.target = FUSED[node.target]
    graph.recompile()
    return make_boxed_func(graph.forward)


BACKEND = aot_autograd(fw_compiler=fuse, decompositions=select_decomp_table())


class Tokens(GPTModule):
    """The reference GPT in float64, which draws nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        rows = torch.randint(60, (8, 13), generator=generator)
        return loader([{"input_ids": row[:-1], "labels": row[1:]} for row in rows], 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def train(strategy: Any, devices: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    recorder = Recorder()
    torch.manual_seed(3)
    module = Tokens(overrides={"vocab_size": 60, "model_dim": 48, "num_layers": 1})
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        precision="64-true",
        max_epochs=1,
        limit_val_batches=0,
    )
    trainer.fit(module)
    return {"losses": recorder.losses, "gradients": recorder.gradients, "found": dict(found)}


def train_rank(rank: int, world: int) -> dict[str, Any]:
    options: dict[str, Any] = {"pipeline_parallel_size": 1, "compile_blocks": {"backend": BACKEND}}
    return train(Hybrid3DStrategy(tensor_parallel_size=world, **options), world)


def test_collectives_of_a_block_are_fused_with_its_products() -> None:
    try:
        wanted = train(Hybrid3DStrategy(), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    for result in run_ranks(train_rank, 2, fresh=True):
        # Of attention and MLP: forward, then the gradient of what they give. What they were given
        # has a gradient that is a sum of products, which is left as it is. Of the head: forward,
        # then the gradient of what it was given.
        assert result["found"] == {"fused_all_gather_matmul": 5, "fused_matmul_reduce_scatter": 3}
        close = {"rtol": 0, "atol": TOLERANCE}
        torch.testing.assert_close(result["losses"], wanted["losses"], **close)
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            torch.testing.assert_close(got, want, **close)
