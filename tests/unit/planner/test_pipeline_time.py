"""The walk and the closed form against the package's simulator."""

from dataclasses import replace

import pytest

from lightning_par.engine.pipeline.schedules import (
    build_schedule,
    one_f_one_b,
    SCHEDULES,
    ScheduleSpec,
)
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import in_flight
from lightning_par.planner.part_cost import StageTime
from lightning_par.planner.pipeline_time import pipeline_seconds, quick_pipeline
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions

CASES = [(name, p, m) for name in sorted(SCHEDULES) for p, m in ((2, 4), (4, 8), (3, 7))]


def simulated(name: str, p: int, m: int, times: list[StageTime], message: float) -> float:
    return simulate(
        build_schedule(name, p, m),
        forward=[t.forward for t in times],
        backward=[t.backward for t in times],
        backward_weight=[t.weight for t in times],
        p2p=message,
    ).makespan


def unequal(stages: int) -> list[StageTime]:
    return [StageTime(2 + 0.3 * s, 4.5 + 0.2 * (s % 3), 1.9 + 0.1 * s) for s in range(stages)]


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_the_walk_equals_the_simulator_with_unequal_stages(name: str, p: int, m: int) -> None:
    times = unequal(build_schedule(name, p, m).num_stages)
    found = pipeline_seconds(name, p, m, 2, times, 0.4)
    assert found == pytest.approx(simulated(name, p, m, times, 0.4), rel=1e-12)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_long_step_is_the_simulated_one_plus_its_steady_state(name: str) -> None:
    p, m = 4, 98
    times = unequal(build_schedule(name, p, m).num_stages)
    whole = simulated(name, p, m, times, 0.1)
    # Stages as unequal as these, the slowest 1.6 times the fastest, settle late under zb-h2.
    assert pipeline_seconds(name, p, m, 2, times, 0.1) == pytest.approx(whole, rel=1.5e-2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_closed_form_equals_the_simulator_with_equal_stages(name: str) -> None:
    p, m = 4, 12
    layout = Layout(sizes=ParallelSizes(pipeline=p), microbatches=m, schedule=name, virtual=2)
    times = [StageTime(2.0, 4.5, 2.0)] * layout.stages
    busy = m * sum(t.forward + t.backward for t in times) / p
    found = quick_pipeline(layout, times, busy, 0.0)
    assert found == pytest.approx(simulated(name, p, m, times, 0.0), rel=1e-12)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (3, 9), (8, 16)])
def test_micro_batches_in_flight_equal_the_simulated_ones(name: str, p: int, m: int) -> None:
    simulation = simulate(build_schedule(name, p, m))
    assert in_flight(name, p, m, 2) == pytest.approx(simulation.peak_per_rank)


@pytest.mark.parametrize(
    ("schedule", "said"), [("interleaved", "interleaved x3"), ("1f1b", "1f1b")]
)
def test_a_layout_tells_virtual_stages_where_there_are_some(schedule: str, said: str) -> None:
    layout = Layout(sizes=ParallelSizes(pipeline=2), schedule=schedule, virtual=3)
    assert f", {said}, 1 x 1," in str(layout)


def test_a_new_schedule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user may ask for, what a search tries and what is forecast follow from its row."""
    row = ScheduleSpec(
        build=lambda p, m: replace(one_f_one_b(p, m), name="mine"),
        peak_in_flight=lambda r, p, v: p - r,
    )
    monkeypatch.setitem(SCHEDULES, "mine", row)  # type: ignore[arg-type]
    assert MeshOptions(schedule="mine").place_stages(4) == (0, 1, 2, 3)
    shape = TransformerShape(layers=8, model_dim=1024, heads=8, length=1024, vocab=5000)
    space = LayoutSpace(devices=4, samples=8, fixed=(("pipeline", 4),))
    tried = {layout.schedule for layout in space.layouts(shape)}
    assert tried == {"1f1b", "interleaved", "interleaved-zb", "mine", "zb-h1", "zbv"}
    planner = Planner(shape=shape, device=load_profile("h100"))
    known, new = (
        planner.predict(
            Layout(sizes=ParallelSizes(pipeline=4), microbatches=8, schedule=name),
        )
        for name in ("1f1b", "mine")
    )
    assert (known.time, known.memory) == (new.time, new.memory)
    assert in_flight("mine", 4, 8) == in_flight("1f1b", 4, 8)
