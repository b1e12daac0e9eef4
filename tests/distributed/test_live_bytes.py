"""The instrument that counts live bytes sees the shards of this rank, and no whole tensor."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import distribute_tensor, Shard

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from lightning_par.observe.live_bytes import LiveBytes
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.samples import byte_loader


@ranks(2)
def test_live_bytes_are_those_of_the_shards(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    shard = distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)])
    with LiveBytes(besides=[shard.to_local()]) as live:
        made = shard + 1
        whole = made.full_tensor()
        del whole
        while live.now > made.to_local().nbytes:  # gloo's thread may hold what it gathered a while
            time.sleep(0.01)
        assert live.now == made.to_local().nbytes == 4 * 15
        assert live.peak >= 4 * 15 + 4 * 30


class SetUp(Callback):
    """Notes the peak of the set-up, and what is there after it."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.peak, self.held = live, 0, 0

    def on_fit_start(self, *_: object) -> None:
        self.peak, self.held = self._live.peak, self._live.now


def set_up(rank: int, world: int, tensor: int) -> tuple[int, int, int]:
    options = {"tensor_parallel_size": tensor, "data_parallel_size": world // tensor}
    strategy = Hybrid3DStrategy(**options, pipeline_parallel_size=1, zero_stage=3)
    module = GPTModule(overrides={"num_layers": 8, "model_dim": 128})
    with LiveBytes() as live:
        seen = SetUp(live)
        trainer = quiet_trainer(strategy=strategy, devices=world, max_steps=1, callbacks=[seen])
        trainer.fit(module, byte_loader())
    block = sum(p.numel() * p.element_size() for p in module.model.blocks[0].parameters())
    return seen.peak, seen.held, block


@pytest.mark.parametrize("tensor", [1, 2])
def test_set_up_holds_the_shards_and_one_unit_that_is_cut(tensor: int) -> None:
    """A whole model of 8 blocks would be far more than two of them."""
    for peak, held, block in run_ranks(set_up, 4, tensor):
        assert held > 2 * block
        assert peak <= held + 2 * block
