"""A command imports torch or Lightning only if what it does needs them, and after its options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_par import cli
from lightning_par.commands import COMMANDS, LIGHTNING_COMMANDS, overview, parallel_cli
from lightning_par.observe.certificate import Certificate

RUN_ALL = """
import contextlib, io, json, sys
from lightning_par.cli import main

found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:], status = words, 0
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    found.append([status, sorted({"torch", "lightning"} & {*sys.modules})])
print(json.dumps(found))
"""
PROVED = Certificate(
    versions={"torch": "2"},
    layout={"tp": 2},
    options={},
    seed=0,
    precision="32-true",
    steps=3,
    data={"epoch": 0, "batch": 3},
    proofs={},
    decisions=[],
    weights={"parameters": 5},
)


def imported_by(commands: list[list[str]]) -> list[list[object]]:
    """Run commands one after another in a fresh process; return the status of each, and which of
    torch and Lightning were in memory after it.
    """
    program = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_what_needs_no_torch_imports_none(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text(PROVED.to_json())
    answered = [
        *([name, "--help"] for name in COMMANDS),
        ["fit", "--islands=2", "--help"],
        ["--help"],
        ["-h"],
        ["--version"],
        ["schedule", "--schedule=zbv"],
        ["explain"],
        ["explain", "LP203"],
        ["certificate", str(tmp_path)],
        ["certificate", str(tmp_path), str(tmp_path)],
    ]
    refused = [["explain", "LP999"], ["verify", "--steps=0"], ["fit", "--islands=0"]]
    mistaken = [["inspect"], ["search", "--keep=1"], ["rehearse", "--rank=one"]]
    assert imported_by(answered + refused + mistaken) == (
        [[0, []]] * len(answered) + [[1, []]] * len(refused) + [[2, []]] * len(mistaken)
    )


def test_what_reads_tensors_imports_torch_alone(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    commands = [["backends"], ["inspect", missing], ["export", "--ckpt", missing, "--out=a.ckpt"]]
    assert imported_by(commands) == [[0, ["torch"]], [1, ["torch"]], [1, ["torch"]]]


def test_overview_has_a_line_for_every_command() -> None:
    lines = [line.split() for line in overview().splitlines() if line.startswith("  ")]
    named = {" ".join(words[:2]) if words[1].startswith("--") else words[0] for words in lines}
    assert named == {*COMMANDS, *LIGHTNING_COMMANDS, "fit --islands"}


def test_parser_of_lightning_is_found_at_the_entry_point() -> None:
    assert cli.ParallelCLI is parallel_cli.ParallelCLI
    assert cli.make_cli is parallel_cli.make_cli
    with pytest.raises(AttributeError, match=r"'lightning_par\.cli' has no attribute 'make'"):
        _ = cli.make
