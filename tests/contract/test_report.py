"""The report in a real browser: what it says is there, the timeline is drawn, and it zooms."""

from pathlib import Path
from typing import Any

import pytest

from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.profiling.html_report import Report, Table, write_report
from lightning_par.profiling.pipeline_record import RankRecord, StepRecord, TimedTransfer
from tests.support.browser import open_page, Page

pytestmark = pytest.mark.contract
RANKS, MICROBATCHES, STEPS = 3, 5, 2
ACTIONS = RANKS * MICROBATCHES * 3
HOSTILE = '</script><b id=planted>& "x" <!-- \''


def records() -> tuple[list[RankRecord], Any]:
    """Two simulated steps of a schedule that splits the backward."""
    simulation = simulate(build_schedule("zb-h1", RANKS, MICROBATCHES))
    found = []
    for rank, row in enumerate(simulation.events):
        steps = []
        for step in range(STEPS):
            begin = 5.0 + 0.030 * step
            events = [
                TimedAction(e.action, begin + e.start / 1e3, begin + e.end / 1e3) for e in row
            ]
            wait = (events[0].start, events[0].start + 2e-4)
            steps.append(
                StepRecord(
                    step=step,
                    start=begin,
                    end=begin + 0.028,
                    actions=tuple(events),
                    waits=(0.0,) * len(events),
                    transfers=(TimedTransfer("tp", "all_gather", 4096, 2048.0, *wait, (wait,)),),
                    entries=(),
                    expected=(),
                    blocks={},
                )
            )
        found.append(RankRecord(rank=rank, place={"pp": rank}, steps=tuple(steps), clock_error=0.0))
    return found, simulation


def write(folder: Path) -> Path:
    measured, simulation = records()
    predicted = [
        [TimedAction(e.action, e.start / 1e3, e.end / 1e3) for e in row]
        for row in simulation.events
    ]
    rows = [(r.name, "1.5", HOSTILE) for r in measured]
    report = Report(
        title=f"Title {HOSTILE}",
        headline={"bubble, measured": "28.1 %"},
        remarks=[f"Remark {HOSTILE}"],
        records=measured,
        predicted=predicted,
        tables=[
            Table(key="stages", title="Stages", note="n", columns=("rank", "ms", "x"), rows=rows)
        ],
    )
    return write_report(report, folder / "report.html")


def boxes(page: Page) -> list[float]:
    """Widths of the boxes of actions."""
    expression = (
        "[...document.querySelectorAll('#timeline rect.action')].map(r => +r.getAttribute('width'))"
    )
    found: list[float] = page.ask(expression)
    return found


def test_report_draws_every_action_zooms_and_says_no_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")
    with open_page(path, tmp_path) as page:
        assert page.ask("document.querySelectorAll('#stages tbody tr').length") == RANKS
        assert page.ask("document.querySelector('#planted')") is None
        assert HOSTILE in page.ask("document.body.innerText")
        assert len(boxes(page)) == 2 * ACTIONS  # the last step, and what was predicted for it
        page.ask("document.getElementById('all').click()")
        page.settle()
        whole = boxes(page)
        assert len(whole) == (STEPS + 1) * ACTIONS
        assert page.ask("document.querySelectorAll('#timeline rect.wait').length") == STEPS * RANKS
        left, top = page.ask(
            "(r => [r.left, r.top])(document.getElementById('timeline').getBoundingClientRect())"
        )
        x, y = left + 160, top + 40
        for _ in range(4):
            page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
        near = boxes(page)
        assert 0 < len(near) < len(whole)
        assert max(near) > 3 * max(whole)
        page.mouse("mouseMoved", x, y)
        assert page.ask("document.getElementById('tip').textContent").startswith("0F0: stage 0")
        page.mouse("mousePressed", x + 400, y, button="left", buttons=1, clickCount=1)
        page.mouse("mouseMoved", x, y, button="left", buttons=1)
        page.mouse("mouseReleased", x, y, button="left", clickCount=1)
        labels = "[...document.querySelectorAll('#timeline text.tick')].map(t => t.textContent)"
        assert not page.ask(labels)[0].startswith("0")
        page.ask("document.getElementById('all').click()")
        page.settle()
        assert boxes(page) == pytest.approx(whole)
        page.save_screenshot(tmp_path / "report.png")
        assert page.messages == []


def test_an_error_of_a_page_is_heard(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('first'); missing();</script>")
    with open_page(broken, tmp_path) as page:
        assert len(page.messages) == 2
