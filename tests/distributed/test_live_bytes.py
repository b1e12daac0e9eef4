"""The instrument that counts live bytes sees the shards of this rank, and no whole tensor."""

import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor, Shard

from lightning_par.engine.memory.live import LiveBytes
from tests.support.ranks.api import ranks


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
