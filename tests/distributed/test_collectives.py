"""Each conjugate pair computes, forward and backward, what one process does on the whole tensor."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile

from lightning_par.engine.collectives import (
    all_gather,
    all_reduce,
    copy_to_group,
    gather_from_shards,
    gather_partial,
    reduce_scatter,
    reduce_to_shards,
    reduce_to_whole,
    slice_to_shard,
    split_sizes,
)
from tests.support.ranks.api import ranks

SHAPES = [((6, 5, 7), 0), ((2, 6, 5), 1), ((2, 5, 6), -1)]
"""Shape and the dim that is cut; 6 divides by 2 and by 3."""
UNEVEN = [((7, 5), 0), ((2, 7, 5), 1), ((2, 5, 7), -1), ((2, 4), 1)]
"""On 3 ranks 7 is cut into 3, 3, 1 and 4 into 2, 2, 0."""


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def leaf(x):
    return x.clone().requires_grad_()


def shard(x, dim, rank, world):
    return x.split(split_sizes(x.shape[dim], world), dim)[rank].contiguous()


def per_rank(world, *shape):
    """What each rank holds, known to all."""
    return [leaf(random(*shape, seed=rank + 1)) for rank in range(world)]


def equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "parts", "sizes"),
    [(7, 3, [3, 3, 1]), (4, 3, [2, 2, 0]), (6, 3, [2, 2, 2]), (1, 2, [1, 0]), (5, 1, [5])],
)
def test_split_sizes_are_those_of_chunk(size, parts, sizes):
    assert split_sizes(size, parts) == sizes
    chunks = [c.numel() for c in torch.arange(size).chunk(parts)]
    assert chunks == [s for s in sizes if s]


@ranks(3)
def test_all_reduce_leaves_its_input_alone(rank, world):
    group, x = dist.group.WORLD, torch.full((2, 5), float(rank + 1)).t()
    assert torch.equal(all_reduce(x, group), torch.full((5, 2), 6.0))
    assert torch.equal(all_reduce(x, group, "max"), torch.full((5, 2), 3.0))
    assert torch.equal(x, torch.full((5, 2), float(rank + 1)))


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), UNEVEN)
def test_all_gather_joins_uneven_shards(rank, world, shape, dim):
    whole = random(*shape)
    got = all_gather(shard(whole, dim, rank, world), dim, dist.group.WORLD, whole.shape[dim])
    assert torch.equal(got, whole)


@ranks(2)
def test_functional_all_gathers_of_a_cpu_run_under_a_short_name(rank, world):
    """See Note [Name of a finished all-gather] in lightning_par/engine/collectives.py."""
    operators, group = torch.ops._c10d_functional, dist.group.WORLD
    wholes = [random(4, 3), random(6).float(), random(2, 0)]
    parts = [shard(whole, 0, rank, world) for whole in wholes]
    mesh = init_device_mesh("cpu", (world,))
    with profile() as profiler:
        got = operators.all_gather_into_tensor_coalesced(parts, world, group.group_name)
        got = [operators.wait_tensor(each) for each in got]
        assert torch.equal(all_gather(parts[0], 0, group), wholes[0])
        whole = DTensor.from_local(parts[1], mesh, [Shard(0)], run_check=False).full_tensor()
    assert all(map(torch.equal, (*got, whole), (*wholes, wholes[1])))
    ran = Counter(event.name for event in profiler.events())
    # `all_gather` itself needs no kernel of ours.
    assert (ran["c10d::allgather_"], ran["c10d::_allgather_base_"]) == (4, 1)


@ranks(2)
def test_a_gathered_tensor_that_requires_a_gradient_gets_one(rank, world):
    x = leaf(random(3))
    got = all_gather(x, 0, dist.group.WORLD)
    (got * random(6)).sum().backward()
    # That of the operator itself: the sum over what every rank computes from this shard.
    equal(x.grad, shard(random(6), 0, rank, world) * world)


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_reduce_scatter_is_a_shard_of_the_sum(rank, world, shape, dim):
    parts = [x.detach() for x in per_rank(world, *shape)]
    equal(reduce_scatter(parts[rank], dim, dist.group.WORLD), shard(sum(parts), dim, rank, world))


@ranks(3)
def test_copy_sums_the_gradients_of_what_each_rank_did(rank, world):
    x, weights = leaf(random(2, 5)), per_rank(world, 5, 7)
    sum((x @ w.detach()).sin().sum() for w in weights).backward()
    mine = leaf(x.detach())
    out = copy_to_group(mine, dist.group.WORLD)
    assert torch.equal(out, mine)
    (out @ weights[rank].detach()).sin().sum().backward()
    equal(mine.grad, x.grad)


@ranks(3)
def test_reduce_to_whole_sums_and_gives_every_part_the_same_gradient(rank, world):
    parts, factor = per_rank(world, 2, 5), random(2, 5)
    (sum(parts).sin() * factor).sum().backward()
    mine = leaf(parts[rank].detach())
    whole = reduce_to_whole(mine, dist.group.WORLD)
    equal(whole, sum(parts).detach())
    (whole.sin() * factor).sum().backward()
    equal(mine.grad, parts[rank].grad)


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_gather_partial_sums_the_gradients_of_what_each_rank_did(rank, world, shape, dim):
    whole, factors = leaf(random(*shape)), [f.detach() for f in per_rank(world, *shape)]
    sum((whole.sin() * f).sum() for f in factors).backward()
    mine = leaf(shard(whole.detach(), dim, rank, world))
    gathered = gather_partial(mine, dim, dist.group.WORLD)
    assert torch.equal(gathered, whole)
    (gathered.sin() * factors[rank]).sum().backward()
    equal(mine.grad, shard(whole.grad, dim, rank, world))


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_reduce_to_shards_gathers_the_gradient(rank, world, shape, dim):
    parts, factor = per_rank(world, *shape), random(*shape)
    (sum(parts).sin() * factor).sum().backward()
    mine = leaf(parts[rank].detach())
    out = reduce_to_shards(mine, dim, dist.group.WORLD)
    equal(out, shard(sum(parts).detach(), dim, rank, world))
    (out.sin() * shard(factor, dim, rank, world)).sum().backward()
    equal(mine.grad, parts[rank].grad)


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), SHAPES + UNEVEN)
def test_the_partial_gradients_of_slices_sum_to_the_whole(rank, world, shape, dim):
    whole, factor = leaf(random(*shape)), random(*shape)
    (whole.sin() * factor).sum().backward()
    mine = leaf(whole.detach())
    out = slice_to_shard(mine, dim, dist.group.WORLD)
    assert torch.equal(out, shard(whole.detach(), dim, rank, world))
    (out.sin() * shard(factor, dim, rank, world)).sum().backward()
    kept = shard(mine.grad, dim, rank, world).abs().sum()
    equal(kept, mine.grad.abs().sum())
    equal(all_reduce(mine.grad, dist.group.WORLD), whole.grad)


@ranks(3)
@pytest.mark.parametrize(("shape", "dim"), SHAPES + UNEVEN)
def test_gather_from_shards_keeps_this_ranks_gradient(rank, world, shape, dim):
    whole, factor = leaf(random(*shape)), random(*shape)
    (whole.sin() * factor).sum().backward()
    mine = leaf(shard(whole.detach(), dim, rank, world))
    gathered = gather_from_shards(mine, dim, dist.group.WORLD, whole.shape[dim])
    assert torch.equal(gathered, whole)
    (gathered.sin() * factor).sum().backward()
    equal(mine.grad, shard(whole.grad, dim, rank, world))


COUNTS = [
    (lambda x, g: copy_to_group(x, g), [], ["all_reduce"]),
    (lambda x, g: reduce_to_whole(x, g), ["all_reduce"], []),
    (lambda x, g: gather_partial(x, 1, g), ["all_gather_into_tensor"], ["reduce_scatter_tensor"]),
    (lambda x, g: reduce_to_shards(x, 1, g), ["reduce_scatter_tensor"], ["all_gather_into_tensor"]),
    (lambda x, g: slice_to_shard(x, 1, g), [], []),
    (lambda x, g: gather_from_shards(x, 1, g, 4), ["all_gather_into_tensor"], []),
]


def called(mode):
    return [op.__name__ for op, count in mode.get_comm_counts().items() for _ in range(count)]


@ranks(2)
@pytest.mark.parametrize("case", range(len(COUNTS)))
def test_each_function_communicates_what_its_table_says(rank, world, case):
    function, forward, backward = COUNTS[case]
    x = leaf(random(2, 2, 5) if case == 5 else random(2, 4, 5))
    with CommDebugMode() as ahead:
        out = function(x, dist.group.WORLD)
    with CommDebugMode() as behind:
        out.sum().backward()
    assert (called(ahead), called(behind)) == (forward, backward)
