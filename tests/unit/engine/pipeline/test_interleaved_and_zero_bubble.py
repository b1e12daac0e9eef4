"""Laws of the interleaved and the zero-bubble schedules: bubble, memory, what is published."""

from itertools import pairwise, product

import pytest

from lightning_par.engine.pipeline.actions import Action, ActionKind
from lightning_par.engine.pipeline.schedules import (
    build_schedule,
    forward_only,
    interleaved,
    read_schedule,
    SCHEDULES,
)
from lightning_par.engine.pipeline.simulator import simulate, validate_schedule
from lightning_par.engine.pipeline.zero_bubble import dualpipev, interleaved_zb, zb_h1, zb_h2, zbv
from lightning_par.errors import ScheduleError

SIZES = [*product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 7, 8, 9, 16, 17, 32))]
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
TIMES = [(1, 1, 1), (1, 1.2, 1), (10, 11, 8), (18.522, 18.086, 9.337)]
"""T_F, T_I and T_W."""
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]
"""Qi et al. 2401.10241, tables 5 and 9: p, m, T_F, T_I, T_W and T_comm in ms; then the bubble rates
of 1F1B, ZB-H1 and ZB-H2."""


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_simulator_gives_the_published_bubble_rates_to_four_digits(row):
    p, m, forward, backward_input, weight, p2p, *rates = row
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        simulation = simulate(
            build_schedule(name, p, m),
            forward=forward,
            backward=backward_input + weight,
            backward_weight=weight,
            p2p=p2p,
        )
        assert round(simulation.span_bubble, 4) == rate, name


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p, m):
    for v in (2, 3, 4):
        schedule = interleaved(p, m, v)
        validate_schedule(schedule)
        simulation = simulate(schedule, forward=1 / v, backward=2 / v)
        if m % p == 0:
            assert simulation.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
            most = min(m, p * (1 + (p - 1) / (p * v)))
            assert max(simulation.peak_per_rank) == pytest.approx(most)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_of_zb_h1_and_zb_h2_has_the_size_of_the_formula(p, m, times):
    forward, backward_input, weight = times
    costs = {"forward": forward, "backward": backward_input + weight, "backward_weight": weight}
    for build, least, extra in ((zb_h1, p, 1), (zb_h2, 2 * p - 1, 2)):
        simulation = simulate(build(p, m), **costs)
        assert max(simulation.peak_in_flight) <= extra * p - (extra - 1)
        if m >= least:
            assert max(simulation.peak_in_flight) == extra * p - (extra - 1)
            size = (p - 1) * (forward + backward_input - extra * weight)
            assert simulation.span_bubble == pytest.approx(
                size / (m * sum(times) + size), abs=1e-12
            )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_has_no_bubble_from_2p_microbatches_on_and_the_memory_of_1f1b(p, m):
    schedule = zbv(p, m)
    validate_schedule(schedule)
    assert schedule.stages_of_rank(0) == (0, 2 * p - 1)
    simulation = simulate(schedule)
    assert max(simulation.peak_per_rank) <= p
    if m >= 2 * p:
        assert simulation.span_bubble == pytest.approx(0, abs=1e-12)


def size_of(schedule, times):
    """Idle time in the longest span of a rank, if its stages together take `times`."""
    forward, backward_input, weight = (time / len(schedule.stages_of_rank(0)) for time in times)
    simulation = simulate(
        schedule, forward=forward, backward=backward_input + weight, backward_weight=weight
    )
    busy = schedule.num_microbatches * sum(times)
    return simulation.span_bubble / (1 - simulation.span_bubble) * busy


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "rounds"), [*product(range(2, 9), (1, 2, 3, 4))])
def test_the_bubble_of_interleaved_zb_has_the_size_of_the_formula(p, rounds, times):
    forward, backward_input, weight = times
    extra = 0 if rounds == 1 else min(p - 1, p // 2 + 1)
    for v in (2, 3, 4):
        schedule = interleaved_zb(p, rounds * p, v)
        size = (p - 1) * (forward + backward_input - weight) - extra * weight
        assert size_of(schedule, times) == pytest.approx(max(0, size) / v, abs=1e-9)
        assert size_of(interleaved(p, rounds * p, v), times) == pytest.approx(
            (p - 1) * sum(times) / v
        )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaved_zb_holds_no_more_than_interleaved_1f1b(p, m):
    for v in (2, 3, 4):
        schedule = interleaved_zb(p, m, v)
        validate_schedule(schedule)
        assert max(simulate(schedule).peak_per_rank) <= min(m, p + (p - 1) / v) + 1e-12
        if m % p == 0:
            held = max(simulate(interleaved(p, m, v)).peak_per_rank)
            assert max(simulate(schedule).peak_per_rank) <= held + 1e-12


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(2, 9) for m in range(2 * p, 4 * p + 1)])
def test_the_bubble_of_dualpipev_has_the_size_of_the_formula(p, m, times):
    """Where a rank runs the two actions of a pair one after the other."""
    forward, backward_input, weight = times
    size = max(
        (p - 1) * (forward + backward_input - weight),
        (p - 1) * (2 * backward_input - weight) - forward,
    )
    assert size_of(dualpipev(p, m), times) == pytest.approx(size / 2)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipev_holds_half_a_micro_batch_more_than_zbv_and_splits_few_backwards(p, m):
    schedule = dualpipev(p, m)
    validate_schedule(schedule)
    assert max(simulate(schedule).peak_per_rank) <= min(m, p + 0.5)
    if m >= 2 * p:
        for rank, row in enumerate(schedule.actions):
            split = sum(a.kind is ActionKind.BACKWARD_INPUT for a in row)
            assert split == 2 * p - 1 - rank


def test_dualpipev_runs_every_later_forward_next_to_a_backward_of_the_other_stage():
    """The published order of rank 0 of two: a pair is F of one stage and B of the other."""
    assert str(dualpipev(2, 6)).splitlines()[0] == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 0F5 3B3 3F4 0B2 "
        "3B4 3F5 0B3 3B5 0I4 0W4 0I5 0W5"
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_input_comes_first_and_no_rank_runs_two_actions_at_once(name):
    schedule = build_schedule(name, 4, 7)
    costs = [1 + (s % 3) for s in range(schedule.num_stages)]
    simulation = simulate(schedule, forward=costs, backward=5, backward_weight=2, p2p=0.25)
    ends = {e.action: e.end for row in simulation.events for e in row}
    for row in simulation.events:
        assert all(a.end <= b.start for a, b in pairwise(row))
        for event in row:
            stage, kind, m = event.action.stage, event.action.kind, event.action.microbatch
            if kind is ActionKind.BACKWARD_WEIGHT:
                assert event.start >= ends[Action(stage, ActionKind.BACKWARD_INPUT, m)]
            elif kind is ActionKind.FORWARD and stage:
                assert event.start >= ends[Action(stage - 1, kind, m)]
            elif kind is not ActionKind.FORWARD and stage + 1 < schedule.num_stages:
                given = {Action(stage + 1, half, m) for half in BACKWARDS} & ends.keys()
                assert event.start >= ends[given.pop()]


@pytest.mark.parametrize(
    ("owners", "m", "makespan"),
    [((0, 1, 0, 1), 8, 17), ((0, 1, 1, 0), 8, 18), ((0, 1, 2) * 3, 8, 28), ((0, 0), 3, 6)],
)
def test_forward_only_keeps_ranks_with_several_stages_busy(owners, m, makespan):
    schedule = forward_only(owners, m)
    validate_schedule(schedule, training=False)
    assert simulate(schedule).makespan == makespan


V_SHAPE = """
# V-shape
0F0 3F0 3I0 0F1 3W0 3F1 3B1 0B0 0B1  # both ends
1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1
"""


def test_a_schedule_may_be_written_by_hand(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(V_SHAPE)
    schedule = read_schedule(path, 2, 2)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert schedule.splits_backward
    assert str(read_schedule(path, 2, 1)).splitlines()[0] == "0F0 3F0 3I0 3W0 0B0"
    assert build_schedule(str(path), 2, 2) == schedule


@pytest.mark.parametrize(
    ("text", "ranks", "m", "message"),
    [
        ("0F0 0B0", 2, 1, "1 lines with actions, but there are 2 pipeline ranks"),
        ("0F0 0B0\n2F0 2B0", 2, 1, "no action of stage 1, but one of stage 2"),
        (
            "0F0 0B0\n1F0 1B0",
            2,
            3,
            "actions of 1 micro-batches, but num_microbatches=3. Use num_microbatches=1",
        ),
        ("0F0 0X0\n1F0 1B0", 2, 1, "'0X0' is not an action"),
        ("0B0 0F0\n1F0 1B0", 2, 1, "runs 0B0 before 0F0"),
        ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0", 2, 2, "1B1 is missing"),
        (
            "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1",
            2,
            2,
            "rank 0 sends the activations of stage 0 and micro-batch 0, but at this place rank 1 "
            "receives those of stage 0 and micro-batch 1. Use the same order",
        ),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0",
            2,
            2,
            "rank 1 sends the gradients of stage 1 and micro-batch 1, but at this place rank 0 "
            "receives those of stage 1 and micro-batch 0",
        ),
        ("0F0 0F1 1F1 1F0 1B0 1B1 0B0 0B1", 1, 2, "rank 0 sends the activations of stage 0"),
        (
            "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F1 1F0 3F0 3F1 3B0 3B1 1B0 1B1",
            2,
            2,
            "rank 0 sends the activations of stage 0 and micro-batch 0, .* micro-batch 1",
        ),
    ],
)
def test_a_file_that_could_not_run_is_refused(tmp_path, text, ranks, m, message):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        build_schedule(str(path), ranks, m)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ScheduleError, match=r"absent\.txt' cannot be read"):
        read_schedule(tmp_path / "absent.txt", 1, 1)


def test_stages_per_rank_can_be_chosen_for_interleaved_schedules_only():
    for name, flat in (("interleaved", "1f1b"), ("interleaved-zb", "zb-h1")):
        assert build_schedule(name, 2, 2, 3).num_stages == 6
        with pytest.raises(
            ScheduleError, match=f"stages_per_rank=1. Use stages_per_rank=2 or more; .*'{flat}'"
        ):
            build_schedule(name, 2, 2, 1)
    with pytest.raises(ScheduleError, match=r"'zbv' always has 2 stage\(s\) per rank, but 3"):
        build_schedule("zbv", 2, 2, 3)
