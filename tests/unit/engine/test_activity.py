"""What is held after a step is asked for rarely, since a device takes time to say it."""

from itertools import count, pairwise
from unittest.mock import patch

from lightning_par.engine import activity


def test_the_first_steps_are_kept_and_then_one_in_a_second() -> None:
    made, asked, clock = activity.Activity(), count(), count()
    made.held = lambda: next(asked)
    # Two looks at the clock in each step, hence ten steps in a second.
    with patch.object(activity, "monotonic", lambda: next(clock) / 20):
        for made.step in range(1, 201):
            made.end_step()
    steps = [step for step, _, _ in made.ended]
    assert steps[:8] == list(range(1, 9))
    assert all(later - earlier in (10, 11) for earlier, later in pairwise(steps[7:]))
    assert steps[-1] > 180
    assert next(asked) == len(steps)


def test_slow_steps_are_all_kept() -> None:
    made, clock = activity.Activity(), count()
    with patch.object(activity, "monotonic", lambda: float(next(clock))):
        for made.step in range(1, 31):
            made.end_step()
    assert [step for step, _, _ in made.ended] == list(range(1, 31))
