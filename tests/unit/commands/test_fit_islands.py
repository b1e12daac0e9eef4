"""Starting the islands of one machine: restarts, what is given up, and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lightning_par.commands import find_command
from lightning_par.commands.fit_islands import Islands
from lightning_par.commands.parallel_cli import make_cli
from lightning_par.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
WRITES = """
import os, pathlib, sys
island, islands = os.environ["LIGHTNING_PAR_ISLAND"].split("/")
folder = pathlib.Path(sys.argv[1])
starts = len(list(folder.glob(f"{island}-*")))
(folder / f"{island}-{starts}").write_text(f"{islands} {os.environ['PLACE']}")
sys.exit(3 if island == "1" and starts < int(sys.argv[2]) else 0)
"""
"""Leaves a file for every start; island 1 fails at its first starts."""
WAITS = """
import os, pathlib, signal, sys, time
mark = pathlib.Path(sys.argv[1]) / os.environ["LIGHTNING_PAR_ISLAND"][0]
def end(*_):
    mark.write_text("ended")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
mark.write_text("here")
time.sleep(600)
"""


def starts(folder: Path, restarts: int, failures: int) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", WRITES, str(folder), str(failures)]
    status = Islands(command, 3, restarts, {"PLACE": "here"}).run()
    found = sorted(folder.iterdir())
    assert {path.read_text() for path in found} == {"3 here"}
    return status, [path.name for path in found]


def test_an_island_that_fails_is_started_again(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert starts(tmp_path, 2, 2) == (0, ["0-0", "1-0", "1-1", "1-2", "2-0"])
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_island_without_restarts_is_given_up_and_the_others_finish(tmp_path: Path) -> None:
    assert starts(tmp_path, 1, 9) == (1, ["0-0", "1-0", "1-1", "2-0"])


def test_a_signal_ends_every_island(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_par.commands.fit_islands import Islands; "
        "sys.exit(Islands([sys.executable, '-c', *sys.argv[1:]], 2, 1).run())"
    )
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", code, WAITS, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    ) as process:
        end = time.monotonic() + 120
        while sorted(p.name for p in tmp_path.iterdir() if p.read_text()) != ["0", "1"]:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    assert [p.read_text() for p in tmp_path.iterdir()] == ["ended"] * 2


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--islands=0 must be 1(.|\n)*--restarts=-1"):
        find_command("fit_islands")(["--islands=0", "--restarts=-1"])


@pytest.mark.filterwarnings("ignore")
def test_an_island_without_outer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_ISLAND", "0/2")
    run = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=hybrid3d"]
    monkeypatch.setattr(sys, "argv", ["lightning-par", "fit", *run])
    with pytest.raises(ConfigurationError, match="one of several islands, but Hybrid3DStrategy"):
        make_cli()


@pytest.mark.exhaustive
def test_two_islands_train_and_the_first_one_saves(tmp_path: Path) -> None:
    run = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "limit_val_batches": 1,
        "logger": False,
        "enable_progress_bar": False,
        "strategy": {
            "class_path": "lightning_par.Hybrid3DStrategy",
            "init_args": {"outer": {"every": 2, "quantize": "none"}},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": run}))
    words = ["fit", "--islands=2", "--restarts=1", "--state=state", "--config=run.yaml"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_par.cli", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    assert "island 1 joins" in ended.stderr
    saved = torch.load(next(tmp_path.glob("checkpoints/*.ckpt")), weights_only=True)
    assert saved["global_step"] in (2, 4)  # it stops at an exchange, if the other one was ahead
    assert list(tmp_path.glob("state/*.safetensors"))
