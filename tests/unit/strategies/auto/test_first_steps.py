"""The first steps are held against the prediction: told if it holds, warned of if it does not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_par.planner.profiles import load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.strategies.auto import first_steps
from lightning_par.strategies.auto.choice import Choice
from lightning_par.strategies.auto.first_steps import FirstSteps

SHAPE = TransformerShape(layers=2, model_dim=8, heads=2, length=4, vocab=9)
LAYOUT = Layout()
PREDICTED = Planner(shape=SHAPE, device=load_profile("cpu")).predict(LAYOUT)
MOST, ROWS = 30, 4000
LAYER = torch.nn.Linear(4, 5)
TRAINER: Any = SimpleNamespace(lightning_module=LAYER, optimizers=[])


def measure(
    monkeypatch: pytest.MonkeyPatch, share: float, *, counts: bool, measured: bool
) -> list[Any]:
    """Make steps that take a share of the predicted time, but for those that warm up; and return
    what was told.
    """
    clock, told = iter(range(10**6)), list[str]()
    now = [0.0]
    monkeypatch.setattr(first_steps.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(first_steps, "rank_zero_info", lambda text: told.append(f"info {text}"))
    monkeypatch.setattr(first_steps, "rank_zero_warn", lambda text: told.append(f"warn {text}"))
    chosen = Choice(layout=LAYOUT, predicted=PREDICTED, profile="cpu", is_measured=measured)
    steps = FirstSteps(chosen, torch.device("cpu"), counts=counts)
    while not steps.is_over:
        number = next(clock)
        assert number < MOST
        for _ in range(2):  # batches of a step
            steps.begin(TRAINER)
            LAYER(torch.ones(ROWS, 4))
        took = share * PREDICTED.time.seconds
        # Only the median counts.
        now[0] += 50.0 if number < 3 or number == 5 else took
        steps.end()
    steps.end()
    steps.begin(TRAINER)  # a step that nobody measures any more
    assert number == 7
    return told


def test_a_right_prediction_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = measure(monkeypatch, 1.2, counts=False, measured=True)
    assert told.startswith("info auto_parallel: a step takes ")
    assert told.endswith("(-17%).")


@pytest.mark.parametrize(
    ("measured", "advice"), [(True, "if other programs use this machine now"), (False, "calibrate")]
)
def test_a_wrong_prediction_is_warned_of_with_numbers(
    monkeypatch: pytest.MonkeyPatch, measured: bool, advice: str
) -> None:
    (told,) = measure(monkeypatch, 2.0, counts=False, measured=measured)
    seconds = PREDICTED.time.seconds
    assert told.startswith("warn auto_parallel: a step takes ")
    assert f"takes {2 * seconds:.3g} s, predicted {seconds:.4g} s (-50%)." in told
    assert advice in told


def test_memory_is_that_of_the_tensors_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer and one batch with its output, on the way to which there are two batches."""
    (told,) = measure(monkeypatch, 1.0, counts=True, measured=False)
    least = 4 * (4 * 5 + 5 + ROWS * (4 + 5))
    held = float(told.partition("in use holds ")[2].partition(" MiB")[0]) * 2**20
    assert 0.999 * least <= held <= 2 * least  # of four digits
    assert told.startswith("warn")


def test_an_exception_ends_the_measurement() -> None:
    chosen = Choice(layout=LAYOUT, predicted=PREDICTED)
    steps = FirstSteps(chosen, torch.device("cpu"), counts=True)
    for _ in range(2):
        steps.begin(TRAINER)
        steps.end()
    steps.begin(TRAINER)
    live = steps._live
    assert live is not None
    steps.close()
    torch.ones(1000).sum()
    assert live.now < 1000
    assert steps.is_over
