"""Which part of a tensor a rank holds, also where shards are unequal or empty."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_par.checkpoint.pieces import assign_writers, cut_piece
from lightning_par.dtensor import Box
from lightning_par.engine.tensor.parameters import shard_parameter
from lightning_par.errors import CheckpointError, PlanError
from tests.support.ranks.api import ranks

ROWS = (1, 2, 3, 5, 7, 8)


@ranks(6)
@pytest.mark.parametrize("dim", [0, 1])
def test_boxes_of_tensor_and_data_shards_fill_the_whole_once(
    rank: int, world: int, dim: int
) -> None:
    """Tensor parallelism over 2, then sharding over 3 replicas, as the strategy applies them."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_shard", "tp"))
    for rows in ROWS:
        whole = torch.arange(rows * 5.0).view(rows, 5) if dim == 0 else torch.arange(5.0 * rows)
        whole = whole.view(5, rows) if dim == 1 else whole
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        fully_shard(module, mesh=mesh["dp_shard"])
        piece = cut_piece("weight", module.weight)
        assert piece.global_shape == tuple(whole.shape)
        everywhere: list[object] = [None] * world
        dist.all_gather_object(everywhere, (piece.box, piece.values))
        found, count = torch.full_like(whole, torch.nan), torch.zeros_like(whole)
        for box, values in everywhere:
            where = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
            found[where] = values
            count[where] += 1
        assert torch.equal(found, whole), rows
        assert bool((count == 1).all()), rows


def test_what_several_ranks_hold_is_written_once_and_evenly() -> None:
    def box(name: str) -> Box:
        return Box(name, (0,), (3,))

    shared = [(box(f"shared{i}"), 10) for i in range(8)]
    own = [[(box(f"own{rank}"), 100 if rank == 0 else 60)] for rank in range(3)]
    shares = assign_writers([[*own[rank], *shared] for rank in range(3)])
    assert sorted(b.name for share in shares for b in share) == sorted(
        [*(f"own{r}" for r in range(3)), *(b.name for b, _ in shared)]
    )
    load = [100 + 10 * (len(shares[0]) - 1), *(60 + 10 * (len(s) - 1) for s in shares[1:])]
    assert max(load) == 100
    assert min(load) >= 90


@ranks(2)
def test_strips_of_a_dim_are_refused_and_not_taken_for_a_block(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    strips = [_StridedShard(0, split_factor=2)]
    held = DTensor.from_local(
        torch.zeros(4, 2), mesh, strips, run_check=False, shape=(8, 2), stride=(2, 1)
    )
    with pytest.raises(CheckpointError, match="several separate parts of one dim"):
        cut_piece("weight", held)
    with pytest.raises(PlanError, match="one contiguous block of one dim"):
        shard_parameter(torch.zeros(8, 2), strips, mesh, requires_grad=True)
