"""Scripts and command lines on ranks that have torch and Lightning in memory already.

A process of its own takes five seconds of a core before it does anything. What starts processes is
tested with processes; what a script or a configuration does, on the ranks of `ranks.py`, where a
`Trainer` finds itself started as by torchrun.
"""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_par import cli

__all__ = ["command", "command_line", "run_command", "run_script"]

_ROOT = Path(__file__).resolve().parents[2]


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    """Run the command line in this process; return its status, output and errors."""
    monkeypatch.setattr(sys, "argv", ["lightning-par", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def command_line(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process in `tmp_path`, which starts others as it needs them."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "lightning_par.cli", *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def run_script(rank: int, world: int, script: Path, folder: Path, *words: str) -> str:
    """Run a script in `folder`; return what it printed."""
    sys.path.insert(0, str(script.parent))  # as Python does; the next job begins without it
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        patch.object(sys, "argv", [str(script), *words]),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def run_command(rank: int, world: int, folder: Path, *words: str) -> list[str]:
    """Run ``lightning-par`` with these words in `folder`; return what Lightning logged."""
    from lightning_par.cli import main

    with (
        contextlib.chdir(folder),
        patch.object(sys, "argv", ["lightning-par", *words]),
        _messages("lightning.pytorch") as said,
    ):
        main()
    return said


@contextlib.contextmanager
def _messages(name: str) -> Iterator[list[str]]:
    """Keep what a logger and those below it are told."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)
