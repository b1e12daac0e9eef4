"""Every file in configs/ runs as its head comment says, for two steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def command_line(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "lightning_par.cli", *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_runs_two_steps_and_writes_a_checkpoint(config: Path, tmp_path: Path):
    done = command_line(tmp_path, "fit", f"--config={config}", *SHORT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"`max_steps=2` reached", done.stdout + done.stderr)
    assert len(list(tmp_path.rglob("config.yaml"))) == 1
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_sizes_that_do_not_fit_end_with_one_error_and_status_1(tmp_path: Path):
    config = ROOT / "configs" / "gpt_tensor_parallel.yaml"
    done = command_line(tmp_path, "fit", f"--config={config}", "--trainer.devices=3", *SHORT)
    assert done.returncode == 1
    assert "lightning-par: error: " in done.stderr
    assert "Traceback" not in done.stderr
