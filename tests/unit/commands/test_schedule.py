import re
import sys
import xml.etree.ElementTree as ET

import pytest

from lightning_par.cli import main
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import format_schedule


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["lightning-par", "schedule", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        sys.exit(main())
    return stop.value.code or 0, capsys.readouterr()


def test_grid_bubble_and_peaks_are_printed(monkeypatch, capsys):
    status, said = run(monkeypatch, capsys, "--schedule", "zbv", "--stages", 4, "--microbatches", 8)
    assert status == 0
    assert format_schedule(build_schedule("zbv", 4, 8)) in said.out
    assert "step: 25.5 (a micro-batch takes 3 on every rank)" in said.out
    assert "bubble: 0.0588 of the step" in said.out
    assert "bubble: 0.0000 of the longest span" in said.out
    assert "in parts of all its stages: 4 4 4 4" in said.out


def test_times_are_those_of_a_rank_however_many_stages_it_holds(monkeypatch, capsys):
    times = ("--forward", 2, "--backward-input", 3, "--backward-weight", 1, "--p2p", 0.5)
    sizes = ("--stages", 2, "--microbatches", 4)
    for name in ("1f1b", "interleaved", "zb-h1", "zbv"):
        _, said = run(monkeypatch, capsys, "--schedule", name, *sizes, *times)
        assert "a micro-batch takes 6 on every rank" in said.out
    _, said = run(monkeypatch, capsys, "--schedule", "gpipe", *sizes, *times)
    # Four forwards of 2 and backwards of 4, one of each on the other rank, and a message each way.
    assert "step: 31 " in said.out


def test_it_is_drawn(monkeypatch, capsys, tmp_path):
    path = tmp_path / "zbv.svg"
    status, said = run(monkeypatch, capsys, "--schedule", "zbv", "--out", path)
    assert status == 0
    assert f"drawn: {path}" in said.out
    texts = " ".join(t for t in ET.parse(path).getroot().itertext() if t.strip())
    assert "zbv, 8 micro-batches, bubble 5.9 %" in texts
    assert "backward, weights" in texts
    assert "stages 0, 7" in texts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schedule", "zbw"], "'zbw' is neither .* nor a file.*1f1b, "),
        (["--microbatches", 0], "num_microbatches=0 must be 1 or more"),
        (["--p2p", -1], "p2p=-1.0: a time cannot be negative"),
        (["--out", "x.gif"], "must have one of the suffixes"),
        (["--virtual", 3], r"'1f1b' always has 1 stage\(s\) per rank, but 3"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(monkeypatch, capsys, arguments, says):
    status, said = run(monkeypatch, capsys, *arguments)
    assert status == 1
    (line,) = said.err.strip().splitlines()
    assert re.search(says, line), line
