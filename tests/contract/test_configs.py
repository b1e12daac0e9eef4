"""Every file in configs/ runs as its head comment says, for two steps."""

import re
import sys
from pathlib import Path

import pytest

from lightning_par.cli import main
from lightning_par.commands.prediction.run_config import read_settings
from tests.support.cli_scripts import command_line, run_command
from tests.support.ranks.api import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_model_summary=false",
    "--data.max_bytes=100000",
]

pytestmark = pytest.mark.contract


def assert_ran(said: str, folder: Path) -> None:
    assert re.search(r"`max_steps=2` reached", said)
    assert len(list(folder.rglob("config.yaml"))) == 1
    assert len(list(folder.rglob("*.ckpt"))) == 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_config_is_called_by_its_model_strategy_and_ranks(config: Path) -> None:
    text = config.read_text()
    name = re.fullmatch(r"(gpt|bert|mixtral|huggingface)(?:_\w+_(\d+))?", config.stem)
    model, ranks = name[1], name[2] or 2
    read = read_settings(config)
    assert read["model"]["class_path"].lower().startswith(f"lightning_par.models.{model}")
    assert f"\n  devices: {ranks}\n" in text
    assert re.search(rf"^# Ranks: {ranks} \(.*Choose it ", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_config_runs_two_steps_and_writes_a_checkpoint(config: Path, tmp_path: Path):
    """On as many ranks as its Trainer has devices."""
    (devices,) = re.findall(r"^  devices: (\d+)$", config.read_text(), re.MULTILINE)
    command = ["fit", f"--config={config}", *SHORT]
    said = run_ranks(run_command, int(devices), tmp_path, *command, timeout=150)
    assert_ran("\n".join(said[0]), tmp_path)


def test_command_line_starts_the_processes_of_a_config(tmp_path: Path):
    """Of one; all are started alike."""
    config = ROOT / "configs" / "gpt_pipeline_1f1b_2.yaml"
    done = command_line(tmp_path, "fit", f"--config={config}", *SHORT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_ran(done.stdout + done.stderr, tmp_path)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_sizes_that_do_not_fit_end_with_one_error_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Before a process is started, hence in this one."""
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / "gpt_tensor_parallel_2.yaml"
    words = ["fit", f"--config={config}", "--trainer.strategy.tensor_parallel_size=2"]
    words += ["--trainer.devices=3", *SHORT]
    monkeypatch.setattr(sys, "argv", ["lightning-par", *words])
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "lightning-par: error: " in said
    assert "Traceback" not in said
