"""The picture of a layout shows the times, kinds of memory and stages of its prediction."""

import re

import pytest

from lightning_par.commands.prediction.layout_picture import draw_candidate
from lightning_par.errors import ConfigurationError
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.planner.step_time import StepCost
from lightning_par.sizes import ParallelSizes

SHAPE = TransformerShape(layers=9, model_dim=512, heads=8, length=256, vocab=5003)
PLANNER = Planner(shape=SHAPE, device=load_profile("h100"))


def layout(pipeline: int, schedule: str) -> Layout:
    return Layout(
        sizes=ParallelSizes(pipeline=pipeline, data_shard=2),
        micro_batch=1,
        microbatches=6,
        zero_stage=1,
        schedule=schedule,
        virtual=2 if schedule == "interleaved" else 1,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_the_pipeline_that_is_drawn_takes_the_time_that_is_predicted(schedule):
    asked = layout(3, schedule)
    events = PLANNER.timeline(asked)
    assert len(events) == 3
    cost = StepCost(SHAPE, asked, PLANNER.device, PLANNER.code, PLANNER.reached)
    assert max(row[-1].end for row in events) == pytest.approx(cost.body(), rel=1e-9)
    first = [event.end - event.start for event in events[0]]
    assert max(first) > min(first)  # the costs of the stages, not those of slots


@pytest.mark.parametrize("pipeline", [1, 3])
def test_the_picture_says_what_the_prediction_says(pipeline, tmp_path):
    one = PLANNER.predict(layout(pipeline, "1f1b"))
    path = draw_candidate(PLANNER, one, tmp_path / "layout.svg")
    said = re.sub(r"\s+", " ", path.read_text())
    texts = set(re.findall(r">([^<>]+)</text>", said))
    assert {"time of a step (s)", "memory of every pipeline rank (GiB)"} <= texts
    assert {name for name, seconds in one.time.parts.items() if seconds > 0} <= texts
    kinds = {name for rank in one.memory.ranks for name, size in rank.items() if size}
    assert kinds <= texts
    assert ("stage 2" in texts) == (pipeline == 3)
    assert f"rank {pipeline - 1}" in texts
    assert any(f"{one.time.seconds:.4g} s a step" in text for text in texts)


def test_another_suffix_is_refused(tmp_path):
    one = PLANNER.predict(layout(3, "1f1b"))
    with pytest.raises(ConfigurationError, match=r"layout\.jpg.*suffixes \.pdf, \.png, \.svg"):
        draw_candidate(PLANNER, one, tmp_path / "layout.jpg")
