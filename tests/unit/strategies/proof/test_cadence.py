"""Which steps are proved: within a budget of time, at steps drawn from the seed."""

from itertools import pairwise

import pytest

from lightning_par.strategies.proof.cadence import Cadence

_STEP, _PROOF = 0.1, 4.0
"""Seconds."""


class Run:
    """Steps of a run, some of which are proved; a clock that they move."""

    def __init__(self, *, every: int | None = None, share: float | None = None, seed: int = 5):
        self.now, self.proved, self.asked = 100.0, list[int](), list[int]()
        self.cadence = Cadence(every=every, share=share, seed=seed, clock=lambda: self.now)

    def go(self, steps: range, *, step: float = _STEP, proof: float = _PROOF) -> "Run":
        for number in steps:
            if self.cadence.next is not None and number >= self.cadence.next:
                self.asked.append(number)
                self.cadence.begin()
                later = self.cadence.put_off(number)
                if later is None:
                    self.proved.append(number)
                    self.now += proof + step
                    self.cadence.end(number)
                    continue
                self.cadence.next = later
            self.now += step
        return self


def apart(numbers: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(numbers)]


@pytest.mark.parametrize("share", [0.01, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_later_proofs_take_their_share_of_the_time_at_most(share: float, seed: int) -> None:
    run = Run(share=share, seed=seed).go(range(40_000))
    assert run.proved[0] == 0
    spent = _PROOF * len(run.proved[1:])
    assert share / 2.5 < spent / (run.now - 100 - _PROOF) <= share


def test_a_cheap_proof_comes_every_ten_to_twenty_steps() -> None:
    run = Run(share=0.5).go(range(500), proof=0.001)
    assert set(apart(run.proved)) <= set(range(10, 21))
    assert len(set(apart(run.proved))) > 5


def test_the_seed_draws_the_steps() -> None:
    one, same, other = (Run(share=0.01, seed=s).go(range(20_000)).proved for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_an_expensive_first_proof_is_not_paid_for_twice() -> None:
    dear = Run(share=0.01).go(range(1), proof=40.0).go(range(1, 40_000)).proved
    usual = Run(share=0.01).go(range(40_000)).proved
    assert 0 < len(usual) - len(dear) <= 10  # the second one waits for it to be predicted


def test_steps_that_become_slow_or_fast_are_taken_into_account() -> None:
    run = Run(share=0.01).go(range(10_000)).go(range(10_000, 30_000), step=5.0)
    fast = Run(share=0.01).go(range(2000), step=5.0).go(range(2000, 60_000))
    for each in (run, fast):
        assert _PROOF * len(each.proved[1:]) <= 0.01 * (each.now - 100)
    assert len(run.proved) > 60
    assert len(fast.proved) > 25


def test_ranks_exchange_something_in_steps_that_are_proved_and_hardly_in_others() -> None:
    run = Run(share=0.01).go(range(40_000))
    assert len(run.asked) <= len(run.proved) + 2


def test_the_time_between_two_runs_is_not_spent() -> None:
    run = Run(share=0.01).go(range(50))
    run.cadence.pause()
    run.now += 1e6
    assert run.go(range(3000)).proved == [0]  # 4 s need 400 s, or 4000 steps


@pytest.mark.parametrize("pauses", [False, True])
def test_a_number_of_steps_is_kept(pauses: bool) -> None:
    run = Run(every=20).go(range(45))
    if pauses:
        run.cadence.pause()
    assert run.go(range(45, 90)).proved == [0, 20, 40, 60, 80]


def test_without_a_cadence_the_first_step_is_the_only_one() -> None:
    run = Run().go(range(50))
    assert (run.proved, run.cadence.next) == ([0], None)
