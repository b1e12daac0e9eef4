"""Runs whose hosts are killed go on by themselves, with the losses of a run that was not."""

from pathlib import Path

import pytest

from tests.support.faults.restarts import run_and_kill, SAVE_EVERY, undisturbed_losses

TOLERANCE = 1e-10  # float64, as everywhere; another number of replicas sums in another order


def check(tmp_path: Path, kills: int, steps: int, **options: bool) -> None:
    (tmp_path / "one").mkdir()
    wanted = undisturbed_losses(tmp_path / "one", steps)
    run = run_and_kill(tmp_path / "hosts", kills=kills, steps=steps, **options)
    assert {step for step, _ in run.losses} == set(wanted)
    for step, loss in run.losses:
        assert loss == pytest.approx(wanted[step], rel=0, abs=TOLERANCE), step
    assert len(run.killed) == kills
    for start, done, lost in run.lost:
        assert lost == done - start
        assert 0 < lost <= SAVE_EVERY
        assert start % SAVE_EVERY == 0
    # A restart that is itself interrupted says the same as the next one; a rank that is killed
    # may have told of a step that is not yet in its file.
    again = len(run.losses) - steps
    assert 0 < again <= sum(lost for *_, lost in run.lost) + kills
    assert run.left == []


@pytest.mark.timeout(600)
def test_run_goes_on_without_a_host_that_does_not_come_back(tmp_path: Path) -> None:
    check(tmp_path, 1, 4 * SAVE_EVERY, leaves=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_run_outlives_twenty_kills_of_random_hosts(tmp_path: Path) -> None:
    check(tmp_path, 20, 42 * SAVE_EVERY)
