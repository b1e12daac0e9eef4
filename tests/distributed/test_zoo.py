"""The zoo of faults: its trainer equals one process, and its faults are what their rows say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.zoo.comm import AXES, Layout
from benchmarks.zoo.fault import BEGINS, FAULTS, PHASES, STEPS
from benchmarks.zoo.model import build, Config
from benchmarks.zoo.play import CHECKED, play, play_counted, Run, run_of, WATCHING
from benchmarks.zoo.proof import trainer_of
from benchmarks.zoo.trainer import Trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.timeout(300)

LAYOUTS = [
    Layout(dp=2, zero=True),
    Layout(tp=2),
    Layout(pp=2, micro=2),
    Layout(ep=2),
    Layout(dp=2, tp=2, zero=True, sequence=True),
    Layout(cp=2, tp=2, sequence=True),
    Layout(pp=2, ep=2, micro=2),
]
ROOT = Path(__file__).parents[2]
EASY = ["row-parallel-not-summed", "norm-of-one-stage", "moments-start-anew"]


def train(rank: int, world: int, layout: Layout, options: dict[str, Any]) -> Any:
    """Take three steps, one after a checkpoint; return all that can be compared."""
    config = Config(**options)
    trainer = trainer_of(layout, config, Trainer(build(config)).save(), None)
    losses = [trainer.train_step(), trainer.train_step()]
    saved = trainer.save()
    trainer.comm.close()
    trainer = trainer_of(layout, config, saved, None)
    losses += [trainer.train_step(), float(trainer.evaluate(trainer.data.held_out()))]
    found = losses, trainer.norm, trainer.whole("weights"), trainer.whole("second")
    trainer.comm.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_trainer_equals_one_process(layout: Layout) -> None:
    options = {"experts": 4, "dropout": 0.2, "recompute": layout.micro > 1}
    losses, norm, weights, moments = run_ranks(train, layout.world, layout, options)[0]
    one = train(0, 1, Layout(micro=layout.micro), options)
    assert losses == pytest.approx(one[0], rel=1e-11)
    assert norm == pytest.approx(one[1], rel=1e-11)
    assert weights.keys() == one[2].keys()
    for name in weights:
        # Adam divides by the root of sums, whose roundings differ.
        torch.testing.assert_close(weights[name], one[2][name], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(moments[name], one[3][name], rtol=1e-9, atol=1e-13)


def test_rows_are_complete() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    known = {*AXES, "zero", "sequence", "micro", "any"}
    for fault in FAULTS:
        assert 20 < len(fault.story) <= 180, fault.name
        assert fault.source == "own" or any(c.isdigit() for c in fault.source), fault.name
        assert fault.phase in PHASES, fault.name
        assert fault.when in BEGINS, fault.name
        assert {*fault.axis.split(" x ")} <= known, fault.name
        on = {"any", *fault.layout.axes}
        assert {*fault.axis.split(" x ")} <= on, f"{fault.name} needs an axis that is off"


def test_what_is_rare_is_in_no_batch_that_is_proved() -> None:
    data = Trainer(build(Config())).data
    ends = [step for step in range(STEPS) if 2 in data.batch(step)["rows"][:, -1]]
    assert ends[0] == BEGINS["rare"]
    assert not {*ends} & {*CHECKED}


@pytest.mark.parametrize("name", EASY)
def test_a_fault_changes_the_run_and_is_told(name: str) -> None:
    number = next(n for n, fault in enumerate(FAULTS) if fault.name == name)
    fault = FAULTS[number]
    run = run_of(fault)
    healthy = run_ranks(play, run.layout.world, run, None, None, ("invariants",))
    learned = [outcome.learned for outcome in healthy]
    faulty = run_ranks(play, run.layout.world, run, number, learned, WATCHING)[0]
    one, other = healthy[0], faulty
    assert (one.losses, one.metrics) != (other.losses, other.metrics)
    verdict = faulty.verdicts["proof"]
    assert verdict is not None
    assert (verdict.step, verdict.phase, verdict.axis) == (fault.begins, fault.phase, fault.axis)


def test_no_checker_tells_anything_of_a_healthy_run() -> None:
    run = Run(layout=Layout(tp=2, sequence=True), options=(("dropout", 0.2),), resumes=True)
    learned = [outcome.learned for outcome in run_ranks(play, 2, run, None, None, ("invariants",))]
    assert run_ranks(play, 2, run, None, learned, WATCHING)[0].verdicts == dict.fromkeys(WATCHING)


def test_a_checker_that_holds_the_whole_model_needs_memory() -> None:
    run = Run(layout=Layout(dp=2, zero=True))
    without, first, trace = (
        run_ranks(play_counted, 2, run, None, None, checks)
        for checks in [(), ("first",), ("trace",)]
    )
    assert max(without) < max(first) < max(trace)
    assert first[0] > first[1]  # rank 0 takes the step of one process


def test_the_page_tells_what_was_found() -> None:
    page = (ROOT / "docs" / "zoo.md").read_text()
    report = json.loads((ROOT / "benchmarks" / "zoo" / "found.json").read_text())
    phases = report["phases"].values()
    faults = sum(phase["faults"] for phase in phases)
    assert faults == len(FAULTS), "there are other faults since the last `make zoo`: run it"
    assert f"has {len(FAULTS)} such faults" in page
    public = sum(fault.source != "own" for fault in FAULTS)
    assert f"{public} faults are from public reports" in page
    for checker, title in report["checkers"].items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {title} |"))
        at_once, by_end, later = (int(cell.split()[0]) for cell in row.split("|")[2:5])
        found = [sum(phase[checker][n] for phase in phases) for n in (0, 1)]
        assert by_end + later == sum(found), title
        assert at_once <= found[0], title
    misses = page.partition("## What we miss")[2].partition("The proof also misses")[0]
    cells = [line.split("|")[1] for line in misses.splitlines() if line.startswith("|")]
    named = re.findall(r"[a-z]+(?:-[a-z]+)+", "\n".join(cells))
    assert {*named} <= {fault.name for fault in FAULTS}
    assert len(named) == len(FAULTS) - sum(sum(phase["proof"]) for phase in phases) >= 10
