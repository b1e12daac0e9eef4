"""What a report advises: another split of the blocks, and less communication where it is much."""

from dataclasses import replace

import pytest

from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.profiling.pipeline_advice import advise
from lightning_par.profiling.pipeline_record import TimedTransfer
from lightning_par.profiling.pipeline_summary import summarize_pipeline
from tests.unit.profiling.test_pipeline_summary import resolved, steps_of


def found(shares, bounds=((0, 1), (1, 2)), blocks=2):
    """A step whose ranks stand still for their shares of every action, by axis."""
    schedule = build_schedule("1f1b", 2, 4)
    steps, _ = steps_of(schedule, bounds=bounds, block_times=[1.0] * blocks)
    for rank, share in enumerate(shares):
        transfers = [
            TimedTransfer(axis, "all_reduce", 8, 8.0, start, end, ((start, end),))
            for event in steps[rank].actions
            for axis, (start, end) in _parts(event, share)
        ]
        steps[rank] = replace(steps[rank], transfers=tuple(transfers))
    return summarize_pipeline(steps, resolved(blocks), bounds)


def _parts(event, share):
    at, length = event.start, event.end - event.start
    for axis, part in share.items():
        yield axis, (at, at + part * length)
        at += part * length


def test_communication_in_every_stage_is_named_with_its_axis() -> None:
    said = advise(found([{"tp": 0.5, "dp_shard": 0.1}, {"tp": 0.3, "dp_shard": 0.1}]))
    assert len(said) == 2
    assert "at least 40.0 % of the time of every stage" in said[0]
    assert "most of it on tp" in said[0]
    assert "tensor_parallel_size" in said[0]
    assert "no split" in said[0]


@pytest.mark.parametrize(
    ("axis", "option"),
    [("dp_shard", "zero_stage=1"), ("cp", "context_parallel_size"), ("own", "own")],
)
def test_each_axis_has_its_cure(axis, option) -> None:
    assert option in advise(found([{axis: 0.5}] * 2))[0]


def test_communication_of_one_stage_or_little_of_it_is_not_named() -> None:
    for shares in ([{"tp": 0.5}, {}], [{"tp": 0.1}] * 2, [{}, {}]):
        (said,) = advise(found(shares))
        assert said.startswith("No other split of the blocks is predicted to be 5 % faster")


def test_unequal_stages_are_named_besides() -> None:
    said = advise(found([{"tp": 0.5}] * 2, bounds=((0, 3), (3, 4)), blocks=4))
    assert "of every stage" in said[0]
    assert "stage_blocks=[2, 2] instead of [3, 1]" in said[1]
