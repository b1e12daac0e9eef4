"""Times of operations and of blocks: limits that arithmetic gives, and directions."""

from dataclasses import replace

import pytest

from lightning_par.planner.constants import Constants, fitted_constants
from lightning_par.planner.operations import Clock, ranks_inside
from lightning_par.planner.part_cost import PartCosts
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.planner.step_time import StepCost
from lightning_par.sizes import ParallelSizes

H100 = load_profile("h100")
IDEAL = Constants(
    product=1.0,
    inner_half=1e-9,
    memory=1.0,
    link=1.0,
    network=1.0,
    network_joint=1.0,
    network_part=1.0,
    network_wait=1e-9,
    network_part_wait=1e-9,
    link_start=0.0,
    network_start=0.0,
    kernel=0.0,
    host=0.0,
)
CLOCK = Clock(H100, IDEAL)
SHAPE = TransformerShape(layers=4, model_dim=4096, heads=32, length=2048, vocab=50_000)


def block(shape: TransformerShape = SHAPE, *, tensor: int = 1, **changes: object) -> PartCosts:
    layout = Layout(sizes=ParallelSizes(tensor=tensor), micro_batch=2, **changes)
    return PartCosts(shape, layout, Implementation(), Clock(H100, Constants()))


def test_a_product_that_fills_every_wave_runs_at_the_peak() -> None:
    # 132 processors with one tile of 256 x 128 each.
    M, N, K = 256 * 12, 128 * 11, 8192
    assert CLOCK.product(M, N, K) == pytest.approx(2 * M * N * K / H100.flops)
    # One tile more is a wave more.
    assert CLOCK.product(M + 1, N, K) > 1.05 * CLOCK.product(M, N, K)


def test_a_thin_product_takes_the_time_of_its_memory() -> None:
    size = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    assert CLOCK.product(8, 8192, 8192) == pytest.approx(size / H100.bandwidth, rel=0.1)


def test_collectives_move_what_rings_move() -> None:
    size = 1e9
    assert CLOCK.collective("all_gather", size, 8, 8) == pytest.approx(7 / 8 * size / 450e9)
    assert CLOCK.collective("all_reduce", size, 4, 1) == pytest.approx(2 * 3 / 4 * size / 50e9)
    # A group that holds whole nodes has all their ports, but no more than its links.
    assert CLOCK.collective("all_gather", size, 16, 8) == pytest.approx(15 / 16 * size / 400e9)
    assert CLOCK.collective("all_reduce", size, 1, 1) == 0


def test_groups_with_a_part_of_every_node_wait_by_a_share_of_their_own() -> None:
    clock = Clock(H100, replace(IDEAL, network_wait=0.1, network_part_wait=0.5))
    # 2 of 8 devices of each node have 2 of its 8 ports; 8 nodes are three doublings.
    found = clock.collective("all_gather", 1e9, 16, 2)
    assert found == pytest.approx(15 / 16 * 1e9 / 100e9 * (1 + 3 * 0.5))
    for ranks, inside in ((64, 8), (8, 1)):
        moved = (ranks - 1) / ranks * 1e9 / min(450e9, 50e9 * inside)
        assert clock.collective("all_gather", 1e9, ranks, inside) == pytest.approx(moved * 1.3)


@pytest.mark.parametrize(
    ("size", "stride", "inside"),
    [(8, 1, 8), (16, 1, 8), (4, 8, 1), (4, 2, 4), (6, 2, 2), (3, 2, 1)],
)
def test_ranks_of_a_group_on_one_node(size: int, stride: int, inside: int) -> None:
    assert ranks_inside(size, stride, 8) == inside


def test_a_block_costs_its_flops_at_the_peak_and_no_less() -> None:
    tokens = 2 * SHAPE.length
    flops = 2 * tokens * (SHAPE.attention_weights + SHAPE.expert_weights)
    made = block()
    assert made.forward.compute > flops / H100.flops
    assert made.forward.compute < 2.5 * flops / H100.flops
    assert 1.8 < made.backward.compute / made.forward.compute < 2.6
    assert 0.3 < made.weight_compute / made.backward.compute < 0.6


def test_recomputation_adds_a_forward_or_a_part_of_it() -> None:
    none, selective, full = (
        block(recompute=kind).stages([1, 2, 1])[1].backward
        for kind in ("none", "selective", "full")
    )
    forward = block().stages([1, 2, 1])[1].forward
    assert none < selective < full
    assert full - none == pytest.approx(forward)


def test_tensor_ranks_divide_compute_and_add_communication() -> None:
    one, eight = block(), block(tensor=8)
    assert eight.forward.compute < one.forward.compute / 5
    assert sum(one.forward.communication.values()) == 0
    assert eight.forward.communication["tensor"] > 0
    behind = PartCosts(
        SHAPE, eight.layout, Implementation(async_tensor=True), Clock(H100, Constants())
    )
    assert behind.backward.communication["tensor"] < eight.backward.communication["tensor"]


def test_edges_belong_to_the_outer_stages() -> None:
    first, inner, _, last = block().stages([1, 1, 1, 1])
    assert inner.forward < first.forward < last.forward
    assert inner.weight < last.weight


def test_experts_compute_only_chosen_tokens_and_send_them() -> None:
    dense = block()
    sparse = replace(SHAPE, experts=8, experts_per_token=2)
    layout = Layout(sizes=ParallelSizes(data_shard=8, expert=8), micro_batch=2)
    made = PartCosts(sparse, layout, Implementation(), Clock(H100, Constants()))
    assert dense.forward.compute < made.forward.compute < 3 * dense.forward.compute
    assert made.forward.communication["expert"] > 0


def test_devices_take_the_constants_of_their_family() -> None:
    assert fitted_constants("a100-40") == fitted_constants("a100-80") != fitted_constants("h100")
    assert fitted_constants("b200") == fitted_constants("h100")
    shares = ("product", "memory", "link", "network", "network_joint", "network_part")
    for constants in (fitted_constants("a100-80"), fitted_constants("h100")):
        shares = {
            n: v for n, v in vars(constants).items() if n.startswith(("pro", "mem", "li", "net"))
        }
        assert all(0 < share <= 1 for share in shares.values())


def test_zero_3_gathers_the_experts_of_a_rank_only() -> None:
    """At the peak rates, a gather takes the time of its bytes."""
    sparse = replace(SHAPE, experts=8, experts_per_token=2)

    def gathered(expert: int) -> float:
        layout = Layout(sizes=ParallelSizes(data_shard=8, expert=expert), zero_stage=3)
        return StepCost(sparse, layout, H100, Implementation(), IDEAL).gathers()

    dense, one = sparse.attention_weights, sparse.expert_weights
    # Eight ranks gather all; with four groups of experts two ranks hold the same two.
    wanted = (7 / 8 * dense + 1 / 2 * 2 * one) / (7 / 8 * (dense + 8 * one))
    assert gathered(4) / gathered(1) == pytest.approx(wanted, rel=1e-6)


def test_the_optimizer_updates_as_many_experts_with_any_degree_and_replicas_send_fewer() -> None:
    sparse = replace(SHAPE, experts=8, experts_per_token=2)
    costs = [
        StepCost(
            sparse,
            Layout(sizes=ParallelSizes(data_shard=8, expert=expert), zero_stage=2),
            H100,
            Implementation(step_traffic=1e6),
            IDEAL,
        )
        for expert in (1, 2, 8)
    ]
    updates = [cost.optimizer() for cost in costs]
    assert updates == pytest.approx([updates[0]] * 3, rel=1e-4)
    sent = [cost.traffic()["dp_shard"] for cost in costs]
    dense = 4 * SHAPE.attention_weights + SHAPE.table_weights
    width = (4 + 2) * 4 * sparse.expert_weights
    assert sent[2] == pytest.approx(6 * 7 / 8 * dense)  # nobody else holds its experts
    assert sent[0] - sent[2] == pytest.approx(7 / 8 * 8 * width)
    assert sent[1] - sent[2] == pytest.approx(3 / 4 * 4 * width)


def test_gradients_that_a_product_adds_itself_cost_no_pass_of_their_own() -> None:
    def weight(count: int, *, fused: bool) -> float:
        layout = Layout(micro_batch=1, microbatches=count)
        code = Implementation(fused_accumulation=fused)
        return PartCosts(SHAPE, layout, code, Clock(H100, Constants())).weight_compute

    products, fused, apart = weight(1, fused=True), weight(2, fused=True), weight(2, fused=False)
    assert products <= fused < apart
    # Read the new gradient, read and write the sum: 2 + 4 + 4 bytes a weight.
    passes = 10 * SHAPE.block_weights() / (Constants().memory * H100.bandwidth)
    assert apart - products == pytest.approx(passes + 4 * Constants().kernel)
    # A product of few tokens is over before its sums have moved.
    thin = Layout(sizes=ParallelSizes(context=64), microbatches=2)
    code = Implementation(fused_accumulation=True)
    moved = PartCosts(SHAPE, thin, code, Clock(H100, Constants())).weight_compute
    assert moved == pytest.approx(0.8 * passes + Constants().kernel)


@pytest.mark.parametrize(
    ("changes", "code", "ranks_of_data", "rate"),
    [
        ({"zero_stage": 0}, Implementation(), 3, 450e9),  # stages 0 and 1, 3 x 1 devices apart
        ({"zero_stage": 1}, Implementation(), 3, 3 * 450e9),  # gradients of a third
        ({"zero_stage": 1}, Implementation(fsdp=False), 3, 450e9),
        ({"zero_stage": 0}, Implementation(), 8, 50e9),  # on two nodes
    ],
)
def test_outer_stages_sum_the_gradients_of_a_table_that_both_hold(
    changes: dict, code: Implementation, ranks_of_data: int, rate: float
) -> None:
    def cost(shape: TransformerShape, schedule: str = "1f1b") -> StepCost:
        sizes = ParallelSizes(pipeline=2, data_shard=ranks_of_data)
        layout = Layout(sizes=sizes, microbatches=2, schedule=schedule, **changes)
        return StepCost(shape, layout, H100, code, IDEAL)

    assert cost(SHAPE).tied() == pytest.approx(4 * SHAPE.table_weights / rate)
    alone = cost(replace(SHAPE, tied=False))
    assert alone.tied() == 0
    assert cost(SHAPE, "zbv").tied() == 0  # one rank has both
    found, without = cost(SHAPE).predict(), alone.predict()
    assert found.parts["tied"] == cost(SHAPE).tied()
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert sum(without.parts.values()) == pytest.approx(without.seconds)


def test_a_stage_that_waits_for_messages_waits_for_its_host_as_well() -> None:
    layout = Layout(sizes=ParallelSizes(pipeline=2), microbatches=3)

    def times(start: float, *, waits: bool) -> list[float]:
        code, constants = Implementation(async_p2p=not waits), replace(IDEAL, stage_start=start)
        found = StepCost(SHAPE, layout, H100, code, constants).stage_times()
        return [seconds for time in found for seconds in (time.forward, time.backward)]

    assert times(0.25, waits=False) == times(0.0, waits=False)
    before = times(0.0, waits=True)
    assert times(0.25, waits=True) == pytest.approx([seconds + 0.25 for seconds in before])
