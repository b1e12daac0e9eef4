"""Memory by rank, against formulas of the literature."""

from dataclasses import replace

import pytest

from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.planner.memory import block_activations, peak_bytes, predict_memory
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.sizes import ParallelSizes

SHAPE = TransformerShape(layers=8, model_dim=1024, heads=16, length=512, vocab=32_000, dropout=True)
WRITTEN = Implementation(fused_attention=False, fsdp=False, gathers_again=True)
N = 3 * 512
D = 1024


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "bytes_"),
    [
        (1, True, "none", N * D * (34 + 5 * 16 * 512 / D)),
        (4, False, "none", N * D * (10 + 24 / 4 + 5 * 16 * 512 / (D * 4))),
        (4, True, "none", N * D / 4 * (34 + 5 * 16 * 512 / D)),
        (4, True, "selective", N * D / 4 * 34),
        (4, False, "full", 2 * N * D),
    ],
)
def test_a_block_keeps_what_korthikanti_counts(
    tensor: int, sequence: bool, recompute: str, bytes_: float
) -> None:
    """2205.05198, table 2."""
    layout = Layout(
        sizes=ParallelSizes(tensor=tensor),
        micro_batch=3,
        sequence_parallel=sequence,
        recompute=recompute,
    )
    assert block_activations(SHAPE, layout, WRITTEN) == pytest.approx(bytes_)


@pytest.mark.parametrize(("stage", "bytes_"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_are_those_of_zero(stage: int, bytes_: float) -> None:
    """1910.02054, figure 1: 7.5 billion parameters on 64 replicas."""
    shape = TransformerShape(layers=36, model_dim=4096, heads=32, length=2048, vocab=2)
    scale = 7.5e9 / shape.parameters
    layout = Layout(sizes=ParallelSizes(data_shard=64), zero_stage=stage)
    rank = predict_memory(shape, layout, Implementation(gradient_bytes=2, fsdp=False)).ranks[0]
    held = rank["weights"] + rank["gradients"] + rank["states"]
    assert held * scale / 1e9 == pytest.approx(bytes_, rel=5e-3)


def test_the_first_rank_holds_most_activations_and_the_last_the_logits() -> None:
    layout = Layout(sizes=ParallelSizes(pipeline=4), micro_batch=1, microbatches=8)
    found = predict_memory(SHAPE, layout, WRITTEN)
    activations = [rank["activations"] for rank in found.ranks]
    kept = block_activations(SHAPE, layout, WRITTEN)
    assert activations == pytest.approx([2 * kept * flight for flight in (4, 3, 2, 1)])
    assert found.ranks[3]["moment"] == 16 * 512 * 32_000
    assert found.peak_rank == max(range(4), key=lambda r: sum(found.ranks[r].values()))
    assert found.peak == sum(found.ranks[found.peak_rank].values())


@pytest.mark.parametrize("tensor", [1, 4])
def test_logits_in_chunks_take_those_of_a_chunk_and_their_gradients(tensor: int) -> None:
    """8 samples of 512 tokens: 256 tokens have as many logits at once as the rule says."""
    sizes = ParallelSizes(tensor=tensor, pipeline=4)
    layout = Layout(sizes=sizes, micro_batch=8, microbatches=8)
    whole, chunked = (
        predict_memory(replace(SHAPE, chunked_loss=on), layout, WRITTEN) for on in (False, True)
    )
    columns, tokens = 32_000 / tensor, 8 * 512
    assert whole.ranks[3]["moment"] == 16 * tokens * columns
    chunk = max(256, -(-tokens * D // round(columns)))
    wanted = 6 * chunk * columns + 4 * (tokens + columns) * D
    assert chunked.ranks[3]["moment"] == pytest.approx(wanted)
    assert chunked.ranks[3]["moment"] < whole.ranks[3]["moment"] / 3
    assert chunked.ranks[:3] == whole.ranks[:3]


def test_offload_moves_states_to_the_host_and_experts_are_divided() -> None:
    sizes = ParallelSizes(data_shard=4)
    on = predict_memory(SHAPE, Layout(sizes=sizes, zero_stage=2, offload=True))
    off = predict_memory(SHAPE, Layout(sizes=sizes, zero_stage=2))
    assert on.ranks[0]["states"] == 0 < off.ranks[0]["states"]
    assert on.host == pytest.approx(16 * SHAPE.parameters / 4)
    experts = TransformerShape(
        layers=2, model_dim=1024, heads=16, length=512, vocab=2, experts=8, experts_per_token=2
    )
    held = [
        predict_memory(
            experts, Layout(sizes=ParallelSizes(data_shard=8, expert=e), zero_stage=0), WRITTEN
        ).ranks[0]["weights"]
        for e in (1, 8)
    ]
    assert held[0] - held[1] == pytest.approx(2 * 2 * 7 * experts.expert_weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("code", [Implementation(), WRITTEN])
def test_states_of_experts_are_shared_by_as_many_ranks_with_any_expert_degree(
    stage: int, code: Implementation
) -> None:
    """The ranks that hold the same experts shard them; there are fewer where `ep` divides them."""
    experts = replace(SHAPE, experts=64, experts_per_token=2)
    held = [
        predict_memory(
            experts, Layout(sizes=ParallelSizes(data_shard=8, expert=e), zero_stage=stage), code
        ).ranks[0]
        for e in (1, 2, 8)
    ]
    assert len({rank["states"] for rank in held}) == 1
    if stage == 3:
        assert len({rank["weights"] for rank in held}) == 1
        assert len({rank["gradients"] for rank in held}) == 1
    else:  # gathered weights, or those of Megatron-LM, are of the rank's experts only
        assert held[0]["weights"] > held[1]["weights"] > held[2]["weights"]


def test_with_an_expert_degree_context_ranks_shard_experts_too() -> None:
    experts = replace(SHAPE, experts=64, experts_per_token=2)
    states = [
        predict_memory(
            experts, Layout(sizes=ParallelSizes(data_shard=4, context=2, expert=e), zero_stage=3)
        ).ranks[0]["states"]
        for e in (1, 2, 8)
    ]
    weights = 8 * 64 * experts.expert_weights
    assert states[0] - states[1] == pytest.approx(Implementation().state_bytes * weights / 8)
    assert states[1] == states[2]


@pytest.mark.parametrize(("ranks", "recompute"), [(3, "full"), (8, "none")])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_peak_of_few_ranks_is_that_of_all(schedule: str, ranks: int, recompute: str) -> None:
    """With interleaved-zb, a rank in the middle holds most."""
    sizes = ParallelSizes(pipeline=ranks)
    layout = Layout(sizes=sizes, microbatches=17, schedule=schedule, recompute=recompute)
    shape = replace(SHAPE, layers=3 * 2 * ranks, vocab=100)
    assert peak_bytes(shape, layout, WRITTEN) == predict_memory(shape, layout, WRITTEN).peak
