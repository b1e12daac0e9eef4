"""The search: only valid layouts, the fastest that fits, and reasons; without torch."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_par.checkpoint.progress import showing
from lightning_par.errors import MeshError
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.sizes import ParallelSizes
from tests.support.progress import Kept

ROOT = Path(__file__).resolve().parents[3]
MEDIUM = TransformerShape(layers=40, model_dim=5120, heads=40, length=2048, vocab=50_257)
PLANNER = Planner(shape=MEDIUM, device=load_profile("a100-80"))


def test_importing_the_planner_imports_no_torch() -> None:
    names = sorted(p.stem for p in (ROOT / "lightning_par" / "planner").glob("[!_]*.py"))
    names = [n for n in names if n not in ("block_trace", "step_recorder")]  # which read models
    text = "\n".join(f"import lightning_par.planner.{name}" for name in names)
    check = (
        "import sys; sys.exit(str([n for n in ('torch', 'lightning') if n in sys.modules] or ''))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{text}\n{check}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(names) > 10
    assert ended.stderr.strip() == ""


def test_every_layout_divides() -> None:
    shape = TransformerShape(
        layers=6,
        model_dim=64,
        heads=6,
        kv_heads=2,
        length=8192,
        vocab=99,
        experts=4,
        experts_per_token=2,
    )
    found = list(LayoutSpace(devices=12, node=4, samples=24, shortest_context=2048).layouts(shape))
    assert len(found) == len(set(found))
    for one in found:
        sizes = one.sizes
        assert sizes.world_size == 12
        assert one.samples == 24
        assert sizes.tensor in (1, 2)
        assert shape.experts % sizes.expert == 0
        assert sum(one.split(6)) == 6
        assert min(one.split(6)) >= 1
    # 8,192 tokens leave 2,048 to each of four ranks, and no less.
    assert {one.sizes.context for one in found} == {1, 2, 4}
    assert {one.sizes.expert for one in found} == {1, 2, 4}
    assert {one.zero_stage for one in found} == {1, 2, 3}
    assert any(one.sizes.data_replicate > 1 for one in found)


def test_a_context_degree_that_does_not_divide_hides_no_larger_one() -> None:
    """8 chunks do not cut 12300 tokens, but 12 do."""
    shape = replace(MEDIUM, length=12_300)
    space = LayoutSpace(devices=12, node=1, samples=12, shortest_context=2048)
    found = {sizes.context for sizes, _ in space.sizes(shape) if sizes.pipeline == 1}
    assert found == {1, 2, 3, 6}


def test_layouts_whose_tokens_may_need_more_rows_than_parts_of_experts_hold_are_left_out() -> None:
    config = {"num_layers": 2, "model_dim": 64, "num_heads": 4, "num_experts": 8}
    switch = {"routing": "switch", "experts_per_token": 1, "capacity_factor": 1.0}
    every = LayoutSpace(devices=4, samples=16)
    # 8 tokens may all choose 2 experts of a rank, or send 1 to each of its 4 or 2 experts.
    for more, rows, most in (({}, 32, 2), (switch, 16, 4)):
        shape = read_shape(MixtralConfig(**config, **more), 8)
        space = replace(every, expert_max_rows=rows)
        allowed = {one for one in every.layouts(shape) if one.sizes.expert > 1}
        found = {one for one in space.layouts(shape) if one.sizes.expert > 1}
        assert found
        assert {one.expert_max_rows for one in found} == {rows}
        left = {replace(one, expert_max_rows=None) for one in found}
        assert left < allowed
        assert max(one.micro_batch for one in found) == most


def test_zero_3_shards_over_no_more_nodes_than_were_measured() -> None:
    space = LayoutSpace(devices=64, samples=64, most_gathering_nodes=4)
    gathering = {one.sizes for one in space.layouts(MEDIUM) if one.zero_stage == 3}
    assert gathering
    shards = {sizes.data_shard * sizes.context * sizes.tensor for sizes in gathering}
    assert max(shards) == 32
    assert any(sizes.data_replicate == 8 for sizes in gathering)


def test_the_best_is_the_fastest_of_all_that_fit() -> None:
    space = LayoutSpace(devices=16, samples=64, schedules=("1f1b", "interleaved"))
    result = PLANNER.search(space)
    assert result.considered == len(list(space.layouts(MEDIUM)))
    every = [PLANNER.predict(one) for one in space.layouts(MEDIUM)]
    fits = [one for one in every if one.memory.peak <= PLANNER.limit]
    assert 0 < result.fitting <= len(fits) < len(every)
    fastest = min(one.time.seconds for one in fits)
    assert result.best[0].time.seconds <= fastest * (1 + 1e-9)
    times = [one.time.seconds for one in result.best]
    assert times == sorted(times)
    assert all(one.memory.peak <= PLANNER.limit for one in result.best)


def test_few_samples_are_not_given_a_pipeline_that_they_do_not_fill() -> None:
    planner = Planner(shape=MEDIUM, device=load_profile("h200"))
    best = planner.search(LayoutSpace(devices=8, samples=8), beam=4).best[0]
    plain = planner.predict(Layout(sizes=ParallelSizes(data_shard=8), zero_stage=3))
    assert plain.memory.peak <= planner.limit
    assert best.time.seconds <= plain.time.seconds


def test_every_neighbor_lost_for_a_reason_with_numbers(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    with showing(kept):
        result = PLANNER.search(LayoutSpace(devices=16, samples=64))
    first, *neighbors = kept.works()
    assert first == ("simulating the fastest layouts", "layouts", 16, 16)
    assert neighbors
    assert all(done == total for _, _, done, total in neighbors)
    assert len(result.rejections) > 4
    best = result.best[0]
    for one in result.rejections:
        found = PLANNER.predict(one.layout)
        if one.reason.startswith("memory"):
            assert found.memory.peak > PLANNER.limit
            assert f"{PLANNER.limit / 2**30:.1f} fit" in one.reason
        else:
            assert found.time.seconds >= best.time.seconds
            assert one.reason.partition(":")[0] in best.time.parts


def test_fixed_sizes_are_kept_and_nothing_that_fits_is_said() -> None:
    space = LayoutSpace(devices=16, samples=64, fixed=(("tensor", 2), ("data", 4)))
    result = PLANNER.search(space)
    assert {(one.layout.sizes.tensor, one.layout.sizes.data) for one in result.best} == {(2, 4)}
    with pytest.raises(MeshError, match=r"none of \d+ layouts fits into 67\.1 GiB, 90% of the"):
        PLANNER.search(LayoutSpace(devices=1, samples=1))
    with pytest.raises(
        MeshError, match="no layout of 7 devices can train this model with 5 samples"
    ):
        PLANNER.search(LayoutSpace(devices=7, samples=5, fixed=(("data", 7),)))
    with pytest.raises(MeshError, match="'dp' is no axis"):
        LayoutSpace(devices=1, samples=1, fixed=(("dp", 1),))


def test_the_parts_of_a_step_sum_up_to_it() -> None:
    layout = Layout(
        sizes=ParallelSizes(tensor=2, pipeline=4, data_shard=2),
        microbatches=8,
        recompute="selective",
    )
    found = PLANNER.predict(layout)
    assert sum(found.time.parts.values()) == pytest.approx(found.time.seconds)
    # A hidden state each way for every micro-batch, halved by sequence parallelism.
    assert found.traffic["pp"] == 2 * 8 * 2 * 2048 * 5120 / 2
    assert found.traffic["tp"] == 4 * 2 * 8 * 10 * (2 * 2048 * 5120) / 2
