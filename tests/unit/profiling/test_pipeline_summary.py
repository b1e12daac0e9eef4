"""Laws of the summary of a pipelined step: simulated steps give back what they were made of."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.profiling.pipeline_record import StepRecord, TimedTransfer
from lightning_par.profiling.pipeline_summary import summarize_pipeline


def resolved(blocks):
    return ResolvedPlan(
        plan=ParallelPlan(),
        block_names=tuple(f"blocks.{i}" for i in range(blocks)),
        block_weights=(1,) * blocks,
        edge_weights=(0, 0),
        units={},
        canonical={},
        styles={},
        divided={},
    )


def record(events, waits=None, transfers=(), blocks=None):
    return StepRecord(
        step=0,
        start=events[0].start,
        end=events[-1].end,
        actions=tuple(events),
        waits=tuple(waits or [0.0] * len(events)),
        transfers=tuple(transfers),
        entries=(),
        expected=(),
        blocks=blocks or {},
    )


def steps_of(schedule, *, bounds, block_times, edges=(0.0, 0.0), shift=0.0):
    """The steps of ranks whose stages take the times of their blocks; a backward takes twice."""
    forward = [sum(block_times[lo:hi]) for lo, hi in bounds]
    forward[0] += edges[0]
    forward[-1] += edges[1]
    simulation = simulate(schedule, forward=forward, backward=[2 * f for f in forward])
    steps = []
    for rank, row in enumerate(simulation.events):
        held = schedule.stages_of_rank(rank)
        blocks = {b: block_times[b] for s in held for b in range(*bounds[s])}
        step = record([TimedAction(e.action, e.start, e.end) for e in row], blocks=blocks)
        steps.append(step.shifted(shift))
    return steps, simulation


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_a_simulated_step_is_predicted_exactly(name, chunks):
    schedule = build_schedule(name, 3, 6, chunks)
    ends = [0, 1, 3, 4, 6, 7, 9][:: 2 // chunks]
    bounds = tuple(pairwise(ends))
    times = [0.1, 0.3, 0.2, 0.2, 0.1, 0.4, 0.3, 0.1, 0.2][: ends[-1]]
    steps, simulation = steps_of(schedule, bounds=bounds, block_times=times, shift=1000.0)
    found = summarize_pipeline(steps, resolved(ends[-1]), bounds)
    assert found.bubble == pytest.approx(simulation.bubble)
    assert found.predicted == pytest.approx(simulation.bubble)
    assert found.makespan == pytest.approx(simulation.makespan)
    for rank in found.ranks:
        assert rank.bubble == pytest.approx(rank.predicted)
        assert rank.compute == pytest.approx((1 - rank.bubble) * found.makespan)
    mean = sum(rank.bubble for rank in found.ranks) / 3
    assert mean == pytest.approx(found.bubble)


def test_equal_stages_have_the_bubble_of_the_formula_and_need_no_other_split():
    bounds, p, m = ((0, 1), (1, 2), (2, 3), (3, 4)), 4, 8
    steps, _ = steps_of(build_schedule("1f1b", p, m), bounds=bounds, block_times=[0.5] * 4)
    found = summarize_pipeline(steps, resolved(4), bounds)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found.balanced == pytest.approx(found.bubble)
    assert found.imbalance == pytest.approx(0)
    assert found.split.stage_blocks == (1, 1, 1, 1)
    assert found.split.bubble == pytest.approx(found.bubble)


def test_the_split_counts_what_runs_before_and_after_the_blocks():
    """A head that takes as long as two blocks: one block stays with it."""
    bounds = ((0, 3), (3, 6), (6, 8))
    schedule, times = build_schedule("1f1b", 3, 6), [1.0] * 8
    steps, before = steps_of(schedule, bounds=bounds, block_times=times, edges=(0.0, 3.1))
    found = summarize_pipeline(steps, resolved(8), bounds)
    assert found.split.stage_blocks == (3, 4, 1)
    assert found.imbalance == pytest.approx(5.1 / (11.1 / 3) - 1)
    better = ((0, 3), (3, 7), (7, 8))
    steps, after = steps_of(schedule, bounds=better, block_times=times, edges=(0.0, 3.1))
    assert after.makespan < before.makespan
    assert found.split.makespan == pytest.approx(after.makespan)
    assert found.split.bubble == pytest.approx(after.bubble)
    again = summarize_pipeline(steps, resolved(8), better)
    assert again.split.stage_blocks == (3, 4, 1)


@pytest.mark.parametrize(
    ("times", "now", "advised"),
    [
        ([1.4] * 3 + [1.0] * 5, [7, 1], (4, 4)),  # [3, 5] is little better still
        ([1.4] * 3 + [1.0] * 5, [4, 4], (4, 4)),
        ([1.4] * 3 + [1.0] * 5, [3, 5], (3, 5)),
        ([2.0] * 3 + [1.0] * 5, [7, 1], (3, 5)),
        ([2.0] * 3 + [1.0] * 5, [4, 4], (3, 5)),
    ],
)
def test_another_split_has_to_promise_more_than_chance(times, now, advised):
    bounds = ((0, now[0]), (now[0], 8))
    steps, _ = steps_of(build_schedule("1f1b", 2, 4), bounds=bounds, block_times=times)
    assert summarize_pipeline(steps, resolved(8), bounds).split.stage_blocks == advised


def test_blocks_that_were_not_timed_give_no_split():
    bounds = ((0, 1), (1, 2))
    steps, _ = steps_of(build_schedule("gpipe", 2, 2), bounds=bounds, block_times=[1.0, 1.0])
    steps = [replace(step, blocks={}) for step in steps]
    assert summarize_pipeline(steps, resolved(2), bounds).split is None


def test_exposed_communication_counts_once_and_only_inside_actions():
    bounds = ((0, 1), (1, 2))
    steps, _ = steps_of(build_schedule("gpipe", 2, 1), bounds=bounds, block_times=[1.0, 1.0])
    # Rank 0 computes from 0 to 1 and from 4 to 6.
    waits = ((0.5, 0.75), (0.6, 0.8), (0.9, 4.5))  # the second overlaps the first
    transfer = TimedTransfer("tp", "all_reduce", 8, 8.0, 0.5, 4.5, waits)
    steps[0] = replace(steps[0], transfers=(transfer,))
    found = summarize_pipeline(steps, resolved(2), bounds)
    assert found.ranks[0].exposed == pytest.approx(0.3 + 0.1 + 0.5)
    assert found.ranks[0].compute == pytest.approx(3 - 0.9)
    assert found.ranks[1].exposed == 0
