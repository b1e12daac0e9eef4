"""Bytes that are alive on a "device" while gradients leave it, counted at every operation.

On the CPU that is everything but the memory of the host's part.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from lightning_par.observe.live_bytes import LiveBytes
from tests.support.offload_runs import KINDS
from tests.support.parity import own_parameters, quiet_trainer, Result
from tests.support.ranks.api import run_ranks

WIDTH, BLOCKS, SAMPLES = 256, 16, 1
BLOCK = 2 * WIDTH**2
"""Bytes of a block in bfloat16."""
BUCKET = 3 * BLOCK
SMALL = BLOCK / 4
"""More than the activations, and the numbers that are kept of gradients."""
OFFLOAD = {"bucket_size_mb": BUCKET / 2**20}
FREE = {"on_nonfinite": "ignore"}
ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}

# Blocks whose gradients are alive at the same time, from .. to.
LEAVING: dict[str, tuple[int, str, dict[str, Any], tuple[float, float]]] = {
    "1 rank": (1, "zero_offload", OFFLOAD, (1, 1)),
    "1 rank, streamed": (1, "zero_offload", {**OFFLOAD, **FREE}, (1, 1)),
    "1 rank, delayed": (1, "zero_offload", {**OFFLOAD, "delayed_update": 0}, (1, 1)),
    # A gradient, what replicas send and what they get, and what a thread of the network has not yet
    # let go of; at stage 3 a gathered block, too.
    "stage 2 on 2 ranks": (2, "zero_offload", OFFLOAD, (1.5, 5)),
    "stage 3 on 2 ranks": (2, "zero_offload", {**OFFLOAD, "stage": 3}, (1.5, 6)),
}
STAYING: dict[str, tuple[int, str, dict[str, Any], tuple[float, float]]] = {
    "half": (1, "zero_offload", {**OFFLOAD, "offload_fraction": 0.5}, (8, 9)),
    "after the backward": (1, "zero_offload", {**OFFLOAD, "overlap": "off"}, (16, 16)),
    "not offloaded": (1, "hybrid3d", ONE, (16, 16)),
    "stage 2, not offloaded": (2, "hybrid3d", {**ONE, "zero_stage": 2}, (8, 9)),
    # Gradients are final after the whole schedule only.
    "pp2": (
        2,
        "hybrid3d",
        {**ONE, "pipeline_parallel_size": 2, "offload_options": OFFLOAD},
        (8, 9),
    ),
}


class Deep(pl.LightningModule):
    """Weights that are much larger than activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def parallel_plan(self) -> lightning_par.ParallelPlan:
        return lightning_par.ParallelPlan(blocks="blocks")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Counts during the backward of the third step."""

    def __init__(self) -> None:
        self.live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index < 2:
            return
        host = trainer.strategy.parallel_model.host
        held = [] if host is None else host._held.values()
        on_host = [t for h in held for t in (h.master, h.mean, h.square, *h.slots)]
        parameters = [local(p) for p in own_parameters(pl_module).values()]
        self.parameters = sum(p.untyped_storage().nbytes() for p in parameters)
        self.live = LiveBytes([*on_host, *parameters])
        self.live.__enter__()

    def on_before_backward(self, *_: Any) -> None:
        if self.live is not None:
            self.before = self.live.now
            self.live.peak = self.before

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See what a backward leaves; a hook before the step would let gradients stay."""
        host = trainer.strategy.parallel_model.host
        if host is None:
            vars(self)["on_before_optimizer_step"] = self._note
            return
        finish = host.finish

        def finish_and_note(**options: Any) -> None:
            finish(**options)
            self._note()

        host.finish = finish_and_note

    def _note(self, *_: Any) -> None:
        if self.live is not None:
            self.peak, self.left = self.live.peak, self.live.now

    def on_train_batch_end(self, *_: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def weigh(rank: int, world: int, kind: str, options: dict[str, Any]) -> Result:
    watch, strategy = Watch(), KINDS[kind](**options)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=world,
        max_steps=3,
        precision="bf16-true",
        callbacks=[watch],
    )
    samples = TensorDataset(torch.randn(3 * SAMPLES * world, WIDTH))
    trainer.fit(Deep(), DataLoader(samples, batch_size=SAMPLES))
    # A pipeline runs whole backwards where Lightning runs the forward.
    pipelined = options.get("pipeline_parallel_size", 1) > 1
    return {
        "parameters": watch.parameters,
        # Of a backward that frees gathered weights, what is there at its end.
        "gradients": max(watch.peak - (0 if pipelined else watch.before), watch.left),
    }


@pytest.mark.parametrize("name", LEAVING)
def test_gradients_that_leave_are_alive_within_two_buckets(name: str) -> None:
    gathered = BLOCK if "stage 3" in name else 0
    for result in weighed(*LEAVING[name]):
        assert result["gradients"] - gathered <= 2 * BUCKET + SMALL
        shards = 2 if "2 ranks" in name else 1
        # 2 bytes a parameter, and nothing beside it: no master, no moment.
        assert result["parameters"] == BLOCKS * BLOCK / shards


@pytest.mark.parametrize("name", STAYING)
def test_gradients_that_stay_are_all_alive(name: str) -> None:
    """What is counted above is what offloading spares."""
    for result in weighed(*STAYING[name]):
        assert result["gradients"] > 2 * BUCKET + SMALL


def weighed(world: int, kind: str, options: Any, blocks: tuple[float, float]) -> list[Result]:
    results: list[Result] = run_ranks(weigh, world, kind, options, timeout=120)
    low, high = blocks
    for result in results:
        assert low * BLOCK - SMALL <= result["gradients"] <= high * BLOCK + SMALL
    return results
