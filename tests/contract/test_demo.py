"""What `make demo` shows, after fewer steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_par.checkpoint.reader import is_checkpoint
from lightning_par.models import GPTModule

pytestmark = pytest.mark.contract
ROOT = Path(__file__).resolve().parents[2]


def test_demo_trains_draws_and_writes(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_par.demo", "--steps", "10", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Trained on 4 processes (pp 2 x tp 2) for 10 steps" in done.stderr
    assert "    | def main(argv):" in done.stderr
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000
    path = tmp_path / "gpt-step=10.ckpt"
    assert is_checkpoint(path)
    assert (tmp_path / "logs" / "version_0" / "metrics.csv").exists()
    assert GPTModule.load_from_checkpoint(path).config.num_layers
