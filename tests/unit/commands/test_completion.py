import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_par import __version__
from lightning_par.cli import main
from lightning_par.commands import COMMANDS, find_parser, takes_file
from lightning_par.commands.completion import whole_parser


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lightning-par", *arguments])
    with pytest.raises(SystemExit) as stop:
        sys.exit(main())
    said = capsys.readouterr()
    return stop.value.code or 0, said.out, said.err


def test_version_is_printed(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"lightning-par {__version__}\n", "")


@pytest.mark.parametrize("name", [*sorted(COMMANDS), "fit_islands"])
def test_every_command_has_a_parser_named_after_it(name: str):
    parser = find_parser(name)
    assert parser.prog == f"lightning-par {name.replace('fit_islands', 'fit --islands')}"
    assert parser.description


def test_whole_parser_takes_what_the_commands_take():
    given = whole_parser().parse_args(["search", "--config", "run.yaml", "--nodes", "3"])
    assert (given.config, given.nodes, given.device) == ("run.yaml", 3, None)
    given = whole_parser().parse_args(["fit", "--trainer.strategy", "hybrid3d"])
    assert vars(given)["trainer.strategy"] == "hybrid3d"
    with pytest.raises(SystemExit):
        whole_parser().parse_args(["fit", "--trainer.strateg", "hybrid3d", "--trainer.x", "1"])


ASKED = (
    ("lightning-par sea", "search"),
    ("lightning-par search --nod", "--nodes"),
    ("lightning-par fit --trainer.strategy sequence", "sequence_ring"),
    ("lightning-par memory --config run", "run.yaml"),
)


def test_bash_completes_commands_options_values_and_files(monkeypatch, capsys, tmp_path: Path):
    shtab = pytest.importorskip("shtab")
    action = argparse.Action([], "x")
    takes_file(action)
    assert vars(action)["complete"].items() <= shtab.FILE.items()
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    status, script, _ = run(monkeypatch, capsys, "completion", "bash")
    assert status == 0
    (tmp_path / "script").write_text(script)
    (tmp_path / "run.yaml").touch()
    ask = "COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_lightning_par"
    for typed, completed in ASKED:
        command = [bash, "-c", f"source ./script; {ask}; echo $COMPREPLY", "bash", typed]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == completed, typed


def test_completion_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, _, error = run(monkeypatch, capsys, "completion", "zsh")
    assert status == 1
    assert "pip install shtab" in error
