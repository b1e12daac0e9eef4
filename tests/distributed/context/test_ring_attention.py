"""Divided attention equals attention in one process, and sends exactly what is needed."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.attention_reference import attend_divided, Case, errors, make_axis, worst_error
from tests.support.ranks.api import ranks

PACKED = (0, 5, 5, 6, 17, 37)
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "padded": {"padded": True},
    "causal padded": {"causal": True, "padded": True},
    "packed": {"causal": True, "documents": PACKED},
    "packed full": {"documents": PACKED},
    "window": {"causal": True, "window": (6, 0)},
    "window full": {"window": (3, 9), "padded": True},
    "window packed": {"causal": True, "window": (4, 0), "documents": PACKED},
    "sinks": {"causal": True, "has_sinks": True},
    "sinks window padded": {"causal": True, "window": (6, 0), "padded": True, "has_sinks": True},
}
FLOAT64, FLOAT32 = 5e-15, 2e-6  # relative to the largest number; sums in another order


def axes(world: int) -> Iterator[tuple[str, SequenceShard]]:
    for layout, route in itertools.product(("zigzag", "contiguous"), ("direct", "ring")):
        yield f"{layout} {route}", make_axis(world, layout=layout, route=route)
    yield "ulysses", make_axis(world, method="ulysses")
    if world > 2:
        yield "hybrid", make_axis(world, method="hybrid", ulysses_size=2)


def check_parity(world: int, kv_heads_of: tuple[int, ...] = (2,)) -> None:
    """Every method, layout, route and mask; grouped heads, T that does not divide, T < ranks."""
    for name, axis in axes(world):
        for mask, options in MASKS.items():
            for kv_heads in kv_heads_of:
                error = worst_error(Case(kv_heads=kv_heads, **options), axis)
                assert error <= FLOAT64, (name, mask, kv_heads, error)
        for tokens in (world - 1, 1, 8 * world):
            error = worst_error(Case(causal=True, tokens=tokens, scale=0.3), axis)
            assert error <= FLOAT64, (name, tokens, error)
        error = worst_error(Case(causal=True, dtype=torch.float32), axis)
        assert error <= FLOAT32, (name, error)


@ranks(2)
def test_two_ranks_equal_one_process(rank: int, world: int) -> None:
    check_parity(world, (8, 2, 1))


@ranks(4)
def test_four_ranks_equal_one_process(rank: int, world: int) -> None:
    check_parity(world)


@pytest.mark.exhaustive
@ranks(8)
def test_eight_ranks_equal_one_process(rank: int, world: int) -> None:
    check_parity(world)


@ranks(4)
def test_bfloat16_is_at_most_twice_as_far_as_torchs_own(rank: int, world: int) -> None:
    for causal, options in itertools.product((True, False), ({}, {"method": "ulysses"})):
        case = Case(causal=causal, tokens=64, dim=32, kv_heads=4, dtype=torch.bfloat16)
        axis = make_axis(world, **options)
        wanted = case.attend_whole(torch.float64)
        *inputs, grad = case.draw()
        leaves = [x.requires_grad_() for x in inputs]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        out.backward(grad)
        torchs = max(errors([out.detach(), *(x.grad for x in leaves)], wanted))
        found = torch.tensor(worst_error(case, axis))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        assert float(found) <= 2 * torchs


@ranks(4)
def test_every_backend_of_the_cpu_agrees(rank: int, world: int) -> None:
    for options in MASKS.values():
        axis = make_axis(world, backend="eager")
        assert worst_error(Case(kv_heads=2, **options), axis) <= FLOAT64


def sent_bytes(case: Case, axis: SequenceShard) -> int:
    with CommVolume() as volume:
        attend_divided(case, axis)
    sent = torch.tensor(volume.total(operation="send").sent)
    assert volume.total(operation="all_to_all").sent == 0
    dist.all_reduce(sent)
    return int(sent)


def check_bytes(world: int) -> None:
    """The mean over the ranks; M is one rank's keys and values."""
    for kv_heads, dtype in itertools.product((8, 2), (torch.float32, torch.bfloat16)):
        case = Case(tokens=4 * world, kv_heads=kv_heads, causal=True, dtype=dtype)
        M = 2 * case.batch * kv_heads * 4 * case.dim * dtype.itemsize
        assert sent_bytes(case, make_axis(world)) == 2.25 * (world - 1) * M * world
        full = Case(tokens=4 * world, kv_heads=kv_heads, dtype=dtype)
        assert sent_bytes(full, make_axis(world)) == 3 * (world - 1) * M * world
        wide = 4 / dtype.itemsize  # the neighbor ring carries gradients in float32
        ring = make_axis(world, route="ring", layout="contiguous")
        assert sent_bytes(full, ring) == (2 + wide) * (world - 1) * M * world


@ranks(2)
def test_bytes_of_two_ranks_equal_the_formulas(rank: int, world: int) -> None:
    check_bytes(world)


@ranks(4)
def test_bytes_of_four_ranks_equal_the_formulas(rank: int, world: int) -> None:
    check_bytes(world)


@pytest.mark.exhaustive
@ranks(8)
def test_bytes_of_eight_ranks_equal_the_formulas(rank: int, world: int) -> None:
    check_bytes(world)


@ranks(4)
def test_packed_documents_send_the_needed_intervals_only(rank: int, world: int) -> None:
    """Contiguous: ranks hold 10 tokens of 37. Causal: a document's tokens before a border go to
    every later rank that holds some of it, as do their gradients back.
    """
    per_token = 2 * 3 * 2 * 16 * 8  # keys and values of 3 samples, 2 heads, 16 dims, float64
    crossing = 4 + 3 + (3 + 10)  # 6..9 to rank 1; 17..19 to rank 2; 17..19, 20..29 to rank 3
    case = Case(causal=True, documents=PACKED, kv_heads=2)
    axis = make_axis(world, layout="contiguous")
    assert sent_bytes(case, axis) == 3 * crossing * per_token
    apart = Case(causal=True, documents=(0, 10, 20, 30, 37), kv_heads=2)
    assert sent_bytes(apart, axis) == 0


@ranks(4)
def test_rerun_is_equal_bit_by_bit(rank: int, world: int) -> None:
    for route in ("direct", "ring"):
        axis, case = make_axis(world, route=route), Case(causal=True, dtype=torch.float32)
        first, second = attend_divided(case, axis), attend_divided(case, axis)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@ranks(4)
def test_mask_is_gathered_once_for_a_batch(rank: int, world: int) -> None:
    axis = make_axis(world)
    axis.set_length(16)
    x, visible = torch.randn(2, 2, 4, 8), torch.ones(2, 4, dtype=torch.bool)
    with CommVolume() as volume:
        for _ in range(3):
            axis.attend(x, x, x, visible=visible)
        assert volume.total(operation="all_gather").calls == 1
        axis.set_length(16)
        axis.attend(x, x, x, visible=visible)
    assert volume.total(operation="all_gather").calls == 2
