"""Laws of the pipeline schedules: what they contain, what they cost, what is refused."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest

import lightning_par
from lightning_par.engine.pipeline.actions import Action, ActionKind, parse_actions, Schedule
from lightning_par.engine.pipeline.schedules import (
    build_schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    place_stages,
    SCHEDULES,
)
from lightning_par.engine.pipeline.simulator import (
    bubble_fraction,
    format_schedule,
    simulate,
    validate_schedule,
)
from lightning_par.errors import ScheduleError

STAGES = {
    **dict.fromkeys(("1f1b", "gpipe", "zb-h1", "zb-h2"), 1),
    **dict.fromkeys(("dualpipev", "interleaved", "interleaved-zb", "zbv"), 2),
}
"""Per rank."""
SIZES = [*product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 7, 8, 16)), (16, 5), (16, 64)]


def make_schedule(*rows, m=1, owners=None):
    """A schedule written as text, one row per rank."""
    owners = tuple(range(len(rows))) if owners is None else owners
    return Schedule(
        name="mine",
        num_stages=len(owners),
        num_microbatches=m,
        actions=tuple(parse_actions(row) for row in rows),
        rank_of_stage=owners,
    )


def test_every_schedule_is_tested_here():
    assert STAGES.keys() == SCHEDULES.keys(), "say in STAGES how many stages a rank holds"


@pytest.mark.parametrize("text", ["2F0", "0B13", "11I7", "3W2"])
def test_an_action_parses_what_it_prints(text):
    assert str(Action.parse(text)) == text


def test_parse_actions_names_every_word_that_is_not_an_action():
    with pytest.raises(ScheduleError, match=r"2 problems:\n.*'0X1'.*\n.*'F'.*such as 2F0"):
        parse_actions("0F0 0X1 F")


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_training_schedule_is_valid_for_any_number_of_stages_and_microbatches(name, p, m):
    schedule = build_schedule(name, p, m)
    validate_schedule(schedule)
    assert schedule.num_ranks == p
    assert (schedule.num_stages, schedule.num_microbatches) == (p * STAGES[name], m)
    kinds = Counter(action.kind for row in schedule.actions for action in row)
    halves = kinds[ActionKind.BACKWARD_INPUT]
    assert halves == kinds[ActionKind.BACKWARD_WEIGHT]
    assert kinds[ActionKind.FORWARD] == kinds[ActionKind.BACKWARD] + halves
    assert kinds[ActionKind.FORWARD] == schedule.num_stages * m


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_and_makespan_equal_the_formula(name, backward, p, m):
    simulation = simulate(build_schedule(name, p, m), backward=backward)
    assert simulation.makespan == (m + p - 1) * (1 + backward)
    assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_in_flight_is_m_for_gpipe_and_at_most_p_minus_stage_for_1f1b(p, m):
    assert simulate(gpipe(p, m)).peak_in_flight == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_in_flight == tuple(min(p - s, m) for s in range(p))
    assert simulate(forward_only(range(p), m)).peak_in_flight == (1,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_forward_only_has_no_backward_and_takes_m_plus_p_minus_1(p, m):
    schedule = forward_only(range(p), m)
    validate_schedule(schedule, training=False)
    assert {a.kind for row in schedule.actions for a in row} == {ActionKind.FORWARD}
    assert simulate(schedule).makespan == m + p - 1


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_no_rank_runs_two_actions_at_once_and_every_input_comes_first(name):
    simulation = simulate(build_schedule(name, 4, 7), forward=[1, 3, 2, 1], backward=5, p2p=0.25)
    ends = {e.action: e.end for row in simulation.events for e in row}
    for row in simulation.events:
        assert all(a.end <= b.start for a, b in pairwise(row))
        for event in row:
            stage, kind, m = event.action.stage, event.action.kind, event.action.microbatch
            neighbor = stage - 1 if kind is ActionKind.FORWARD else stage + 1
            if 0 <= neighbor < 4:
                assert event.start >= ends[Action(neighbor, kind, m)] + 0.25
            if kind is ActionKind.BACKWARD:
                assert event.start >= ends[Action(stage, ActionKind.FORWARD, m)]


def test_the_slowest_stage_bounds_the_makespan():
    simulation = simulate(one_f_one_b(3, 8), forward=[1, 4, 1], backward=[2, 8, 2])
    assert simulation.makespan == 1 + 8 * 12 + 2


def test_1f1b_order_equals_the_published_figure():
    """Megatron-LM, figure 4: 4 stages, warm-ups of 3, 2, 1 and 0 forwards."""
    rows = str(one_f_one_b(4, 4)).splitlines()
    assert rows[0] == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert rows[1] == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"
    assert rows[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"


def test_split_backwards_and_several_stages_per_rank_can_be_written():
    split = make_schedule("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", m=2)
    validate_schedule(split)
    assert simulate(split).peak_in_flight == (2, 2)
    v_shape = make_schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", owners=(0, 1, 1, 0))
    validate_schedule(v_shape)
    assert v_shape.stages_of_rank(0) == (0, 3)
    assert simulate(v_shape, p2p=1).makespan == 4 + 8 + 4


def test_the_grid_has_one_row_per_rank_and_one_column_per_unit():
    assert format_schedule(gpipe(2, 2)) == (
        "gpipe: 2 stages, 2 micro-batches, bubble 33.3 %\n"
        "rank 0 | 0F0 0F1  .   .   .  0B0 --- 0B1 ---\n"
        "rank 1 |  .  1F0 1F1 1B0 --- 1B1 ---  .   ."
    )


@pytest.mark.parametrize(
    ("rows", "m", "message"),
    [
        (("0F0 0B0", "1F0"), 1, "1B0 is missing"),
        (("0B0", "1F0 1B0"), 1, "0F0 is missing"),
        (("0F0 0F0 0B0", "1F0 1B0"), 1, "0F0 is listed 2 times"),
        (("0F0 0B0", "1B0 1F0"), 1, "rank 1 runs 1B0 before 1F0"),
        (("0F0 1B0", "1F0 0B0"), 1, "rank 0 runs 1B0, but rank 1 holds this stage"),
        (("0F0 0B0 0F3", "1F0 1B0"), 1, "rank 0 runs 0F3, but there are only 2 stages and 1 micro"),
        (("0F0 0I0", "1F0 1B0"), 1, "0I0 is one half of a backward, but the other half 0W0"),
        (("0F0 0W0 0I0", "1F0 1B0"), 1, "rank 0 runs 0W0 before 0I0"),
        (("0F0 0B0 0W0", "1F0 1B0"), 1, "0B0 and 0W0 compute the same gradient"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_action_named(rows, m, message):
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(make_schedule(*rows, m=m))


def test_every_problem_is_listed_in_one_message():
    with pytest.raises(ScheduleError, match=r"3 problems:\n.*2 times.*\n.*0B0.*\n.*1F0") as error:
        validate_schedule(make_schedule("0F0 0F0", "1B0"))
    assert "deadlock" not in str(error.value)


def test_a_deadlock_names_the_blocked_action_of_each_rank_and_what_it_waits_for():
    circle = make_schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", m=2)
    text = (
        "the pipeline schedule 'mine' ends in a deadlock: "
        "rank 0 cannot run 0B0 before 1B0 has run; rank 1 cannot run 1F1 before 0F1 has run. "
        "Move an action that another action waits for to an earlier place in its rank's row."
    )
    for check in (validate_schedule, simulate):
        with pytest.raises(ScheduleError) as error:
            check(circle)
        assert (error.value.code, error.value.message) == ("LP403", text)


def test_a_simulation_without_a_needed_action_says_that_no_rank_runs_it():
    with pytest.raises(ScheduleError, match=r"0B0 before 1B0 \(which no rank runs\)"):
        simulate(make_schedule("0F0 0B0", "1F0"))


def test_a_backward_in_a_forward_only_schedule_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 runs 0B0, but without training only"):
        validate_schedule(gpipe(1, 1), training=False)


def test_an_unknown_name_is_refused_with_the_valid_names():
    with pytest.raises(
        ScheduleError, match=r"'dualpipe' is neither .* nor a file.* 1f1b, .*zb-h2, zbv"
    ):
        build_schedule("dualpipe", 2, 2)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_sizes_below_one_are_refused_together(name):
    with pytest.raises(ScheduleError, match=r"num_ranks=0.*\n.*num_microbatches=-1 must be 1"):
        build_schedule(name, 0, -1)


@pytest.mark.parametrize("name", [*sorted(SCHEDULES), "no/such/file.txt"])
def test_one_rank_holds_the_only_stage_under_every_schedule(name):
    assert place_stages(name, 1) == (0,)


def test_stages_are_placed_as_the_schedule_has_them():
    assert place_stages("1f1b", 3) == (0, 1, 2)
    assert place_stages("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert place_stages("interleaved-zb", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert place_stages("zbv", 2) == place_stages("dualpipev", 2) == (0, 1, 1, 0)


def test_a_placement_that_does_not_fit_is_refused():
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 5, but there are 2 ranks"):
        make_schedule("0F0", "1F0", owners=(0, 5))
    with pytest.raises(ScheduleError, match="lists the ranks of 1 stages, but num_stages is 2"):
        Schedule(name="x", num_stages=2, num_microbatches=1, actions=((), ()), rank_of_stage=(0,))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1, 2]}, "forward has 2 costs, but there are 3 stages"),
        ({"backward": -2}, r"backward=-2\.0: a time cannot be negative"),
        ({"backward_weight": 3}, r"backward - backward_weight=-1\.0: a time cannot be negative"),
        ({"p2p": -1}, "p2p=-1: a time cannot be negative"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(gpipe(3, 2), **costs)


def test_a_grid_of_less_than_one_unit_per_action_is_refused():
    with pytest.raises(ScheduleError, match="forward=0 and backward=2 must both"):
        format_schedule(gpipe(2, 2), forward=0)


def test_the_bubble_of_nothing_is_zero():
    assert bubble_fraction([[], []]) == 0.0


def test_schedules_import_neither_torch_nor_lightning():
    root = Path(lightning_par.__file__).parent
    code = (
        "import sys, types; package = types.ModuleType('lightning_par'); "
        f"package.__path__ = [{str(root)!r}]; sys.modules['lightning_par'] = package; "
        "import lightning_par.engine.pipeline.schedules, lightning_par.profiling.timeline_plot; "
        "print({'torch', 'lightning', 'matplotlib'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
