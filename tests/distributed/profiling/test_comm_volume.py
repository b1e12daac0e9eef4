"""The counted bytes equal the formulas, for each way in which torch communicates."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)

from lightning_par.engine.clock import HostClock
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.ranks.api import ranks

FLOAT = 4


def seen(volume):
    return {(e.axis, e.operation): (e.calls, e.payload, e.sent) for e in volume.entries()}


@ranks(3)
def test_collectives_equal_the_ring_formulas(rank, world):
    x, n = torch.ones(3 * 2, 5), 3
    size = x.numel() * FLOAT
    with CommVolume() as volume:
        dist.all_reduce(x.clone())
        dist.all_gather_into_tensor(torch.empty(n * 6, 5), x)
        dist.all_gather([torch.empty(6, 5) for _ in range(n)], x)
        dist.reduce_scatter_tensor(torch.empty(2, 5), x)
        dist.all_to_all_single(torch.empty(6, 5), x)
        dist.broadcast(x.clone(), 1)
        dist.reduce(x.clone(), 2)
        dist.gather(x, [torch.empty(6, 5) for _ in range(n)] if rank == 0 else None, 0)
        dist.scatter(torch.empty(6, 5), [x] * n if rank == 0 else None, 0)
        dist.barrier()
    assert seen(volume) == {
        ("world", "all_gather"): (2, 2 * n * size, 2 * (n - 1) * size),
        ("world", "all_reduce"): (1, size, 2 * (n - 1) * size // n),
        ("world", "all_to_all"): (1, size, (n - 1) * size // n),
        ("world", "broadcast"): (1, size, size if rank == 1 else 0),
        ("world", "gather"): (1, n * size, size if rank else 0),
        ("world", "reduce"): (1, size, size if rank != 2 else 0),
        ("world", "reduce_scatter"): (1, size, (n - 1) * size // n),
        ("world", "scatter"): (1, n * size, 0 if rank else (n - 1) * size),
    }


@ranks(2)
def test_uneven_all_to_all_counts_what_leaves(rank, world):
    send = [1, 2] if rank == 0 else [3, 5]
    receive = [1, 3] if rank == 0 else [2, 5]
    with CommVolume() as volume:
        x = torch.ones(sum(send), 7, dtype=torch.float64)
        dist.all_to_all_single(torch.empty(sum(receive), 7, dtype=torch.float64), x, receive, send)
    assert volume.total().sent == send[1 - rank] * 7 * 8


@ranks(2)
def test_functional_collectives_are_counted_once(rank, world):
    x, group = torch.ones(4, 5), dist.group.WORLD
    with CommVolume() as volume:
        all_reduce(x, "sum", group).sum()
        all_gather_tensor(x, 0, group).sum()
        reduce_scatter_tensor(x, "sum", 0, group).sum()
        all_to_all_single(x, None, None, group).sum()
    assert seen(volume) == {
        ("world", "all_gather"): (1, 160, 80),
        ("world", "all_reduce"): (1, 80, 80),
        ("world", "all_to_all"): (1, 80, 40),
        ("world", "reduce_scatter"): (1, 80, 40),
    }


@ranks(2)
def test_point_to_point_counts_both_ends(rank, world):
    x, other = torch.ones(3, 5), 1 - rank
    with CommVolume() as volume:
        if rank == 0:
            dist.isend(x, 1).wait()
            dist.recv(torch.empty(3, 5), 1)
        else:
            dist.irecv(torch.empty(3, 5), 0).wait()
            dist.send(x, 0)
        operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x.clone(), other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert seen(volume) == {("world", "recv"): (2, 120, 0), ("world", "send"): (2, 120, 120)}


@ranks(4)
def test_axes_are_told_apart_by_their_groups(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axes = {name: mesh.get_group(name) for name in ("tp", "dp")}
    with CommVolume(axes) as volume:
        dist.all_reduce(torch.ones(6), group=axes["tp"])
        dist.all_reduce(torch.ones(10), group=axes["dp"])
        dist.all_reduce(torch.ones(14))
    assert [(e.axis, e.payload, e.sent) for e in volume.entries()] == [
        ("tp", 24, 24),
        ("dp", 40, 40),
        ("world", 56, 84),
    ]
    assert volume.total(axis="dp").payload == 40
    assert volume.total(operation="all_reduce").calls == 3
    assert volume.total(axis="cp").calls == 0


@ranks(2)
def test_fully_shard_gathers_twice_and_scatters_once(rank, world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    numbers = sum(p.numel() for p in model.parameters())
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    with CommVolume({"dp_shard": mesh.get_group()}) as volume:
        model(torch.ones(3, 6)).sum().backward()
    payload = numbers * FLOAT
    assert seen(volume) == {
        ("dp_shard", "all_gather"): (4, 2 * payload, payload),
        ("dp_shard", "reduce_scatter"): (2, payload, payload // 2),
    }


@ranks(2)
def test_tensor_parallel_layers_reduce_in_forward_and_backward(rank, world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with CommVolume({"tp": mesh.get_group()}) as volume:
        model(torch.ones(5, 6, requires_grad=True)).sum().backward()
    payload = 5 * 3 * FLOAT + 5 * 6 * FLOAT
    assert seen(volume) == {("tp", "all_reduce"): (2, payload, payload)}


@ranks(2)
def test_dtensor_redistribution(rank, world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 7), mesh, [Shard(0)])
    with CommVolume({"tp": mesh.get_group()}) as volume:
        x.redistribute(mesh, [Replicate()]).to_local()
    assert seen(volume) == {("tp", "all_gather"): (1, 112, 56)}


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@ranks(2)
def test_collectives_inside_a_backward_are_seen(rank, world):
    with CommVolume() as volume:
        _ReduceGradient.apply(torch.ones(5, requires_grad=True)).sum().backward()
    assert seen(volume) == {("world", "all_reduce"): (1, 20, 20)}


@ranks(2)
def test_entering_again_goes_on_and_clear_forgets(rank, world):
    volume = CommVolume()
    for _ in range(2):
        with volume:
            dist.all_reduce(torch.ones(5))
    dist.all_reduce(torch.ones(5))
    assert volume.total().calls == 2
    assert str(volume).splitlines() == [
        "axis   operation   calls  payload [B]  sent [B]",
        "world  all_reduce      2           40        40",
        "all    all             2           40        40",
    ]
    volume.clear()
    assert volume.entries() == ()


@ranks(2)
@pytest.mark.parametrize("size", [3, 7])
def test_sent_bytes_are_summed_before_they_are_rounded(rank, world, size):
    with CommVolume() as volume:
        for _ in range(4):
            dist.all_gather_into_tensor(
                torch.empty(2 * size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
            )
    assert volume.total().sent == 4 * size


@ranks(2)
def test_a_clock_times_every_transfer_from_its_call_to_the_end_of_its_wait(rank, world):
    x, clock = torch.ones(5), HostClock()
    began = clock.mark()
    with CommVolume(clock=clock) as volume:
        dist.all_reduce(x.clone())
        work = dist.all_reduce(x.clone(), async_op=True)
        middle = clock.mark()
        work.wait()
        all_reduce(x, "sum", dist.group.WORLD).sum()
        dist.isend(x, 1) if rank == 0 else dist.recv(x, 0)
        volume.enabled = False
        dist.all_reduce(x.clone())
    ended = clock.mark()
    whole, late, functional, message = volume.transfers
    for transfer in volume.transfers:
        marks = [transfer.began, transfer.issued, *(m for w in transfer.waits for m in w)]
        assert began <= marks[0]
        assert marks[-1] <= ended
        assert marks == sorted(marks)
    assert [len(t.waits) for t in (whole, late, functional)] == [1, 1, 1]
    assert late.issued <= middle <= late.waits[0][0]
    assert message.operation == ("send" if rank == 0 else "recv")
    assert volume.total().calls == 4
    dist.barrier()


@ranks(2)
def test_nested_ledgers_both_count_and_what_was_there_comes_back(rank, world):
    methods = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    x, group = torch.ones(5), dist.group.WORLD
    with CommVolume() as outer:
        for _ in range(2):
            with CommVolume() as inner:
                dist.all_reduce(x)
                all_reduce(x, "sum", group).sum()
    all_reduce(x, "sum", group).sum()
    assert (outer.total().calls, inner.total().calls) == (4, 2)
    first, second = CommVolume(), CommVolume()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    all_reduce(x, "sum", group).sum()
    second.__exit__()
    assert (first.total().calls, second.total().calls) == (0, 1), "left in the order of entering"
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == methods


@ranks(2)
def test_communication_of_compiled_code_and_in_inference_mode_is_heard(rank, world):
    group = dist.group.WORLD
    double = torch.compile(lambda x: all_reduce(x * 2, "sum", group) + 1, backend="aot_eager")
    x = torch.ones(7)
    want = double(x)
    with CommVolume() as volume:
        torch.testing.assert_close(double(x), want)
        with torch.inference_mode():
            all_reduce(x, "sum", group).sum()
    assert volume.total().calls == 2
