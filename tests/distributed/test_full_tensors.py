"""Tensors that are gathered, or sent, together are those that each gives by itself."""

import pytest
import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_par.dtensor import full_tensors, whole
from lightning_par.engine.init.materialize import broadcast_values
from lightning_par.engine.tensor.whole_draws import whole_random_draws
from tests.support.one_gpu import on_cuda
from tests.support.ranks.api import ranks

DEVICE = "cuda" if on_cuda() else "cpu"


def made(mesh: DeviceMesh) -> list[Tensor]:
    """Tensors as strategies, users and optimizers place them; some ranks hold nothing of some."""
    whole = [
        torch.arange(rows * 5.0, dtype=dtype, device=DEVICE).view(rows, 5)
        for rows, dtype in [(1, None), (3, None), (7, torch.float64), (8, torch.bfloat16)]
    ]
    kinds = [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
    ]
    tensors: list[Tensor] = [distribute_tensor(w, mesh, kind) for kind in kinds for w in whole]
    strips = [_StridedShard(0, split_factor=2), Replicate()]
    local = torch.full((4, 2), float(mesh.get_local_rank(0)), device=DEVICE)
    tensors.append(
        DTensor.from_local(local, mesh, strips, run_check=False, shape=(8, 2), stride=(2, 1))
    )
    tensors.append(DTensor.from_local(local.clone(), mesh, [Partial(), Replicate()]))
    both = nn.Module()
    for i, value in enumerate(whole[:2]):
        value = value + 0.5
        both.register_parameter(
            f"w{i}", nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)]))
        )
    fully_shard(both, mesh=mesh["dp"])
    tensors.extend(both.parameters())
    return [*tensors, torch.tensor(3.0), torch.empty(0, 4)]


@ranks(6)
@pytest.mark.parametrize("bucket", [2**20, 100, 0])
def test_tensors_gathered_together_are_those_gathered_alone(
    rank: int, world: int, bucket: int
) -> None:
    mesh = init_device_mesh(DEVICE, (3, 2), mesh_dim_names=("dp", "tp"))
    tensors = made(mesh)
    with CommDebugMode() as alone:
        wanted = [whole(t) for t in tensors]
    with CommDebugMode() as together:
        found = list(full_tensors(iter(tensors), bucket=bucket))
    for got, want in zip(found, wanted, strict=True):
        assert type(got) is Tensor
        assert not got.requires_grad
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
    calls, most = together.get_total_counts(), alone.get_total_counts()
    # Three dtypes over one axis, over the other, and over both; then strips, and what is partial.
    assert calls == most if bucket == 0 else calls < most
    if bucket == 2**20:
        assert calls == 3 * (1 + 1 + 2) + 2


@ranks(2)
def test_values_sent_together_arrive(rank: int, world: int) -> None:
    """Of two dtypes, one of them in an order of its own in memory, and on meta."""
    numbers = torch.arange(12.0, device=DEVICE) * (1 if rank == 0 else -1)
    held = [
        numbers.view(3, 4).T,
        torch.zeros(0, device=DEVICE),
        numbers[:1].long(),
        torch.empty(3, device="meta"),
        numbers.clone().reshape(2, 6),
        torch.tensor(5.0 - rank, device=DEVICE),
    ]
    with CommDebugMode() as mode:
        broadcast_values(held, torch.device(DEVICE))
    first = torch.arange(12.0, device=DEVICE)
    assert torch.equal(held[0], first.view(3, 4).T)
    assert torch.equal(held[2], first[:1].long())
    assert torch.equal(held[4], first.view(2, 6))
    assert float(held[5]) == 5
    assert mode.get_total_counts() == 2


@ranks(2)
def test_runs_side_by_side_draw_whole_tensors_until_the_last_one_ends(
    rank: int, world: int
) -> None:
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(1)
    wanted = torch.zeros(4, 3, device=DEVICE).normal_()
    first, second = whole_random_draws(), whole_random_draws()

    def draw() -> Tensor:
        torch.manual_seed(1)
        return whole(
            distribute_tensor(torch.zeros(4, 3, device=DEVICE), mesh, [Shard(0)]).normal_()
        )

    with second:
        with first:
            assert torch.equal(draw(), wanted)
        assert torch.equal(draw(), wanted)
    assert not torch.equal(draw(), wanted)
