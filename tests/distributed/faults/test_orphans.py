"""A first process that ends while the others still import leaves none of them behind."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.test_launch import environment, marked

SCRIPT = """
import os, signal, sys
import lightning_par
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

class Module(ToyModule):
    def configure_callbacks(self):
        if sys.argv[1] == "terminated" and self.trainer.local_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.trainer.local_rank == 0:
            raise KeyError("no such key")
        return []

strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=2)
trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=1)
trainer.fit(Module(), loader(ToyData(8), 4))
"""
LIMIT = 60.0
"""Seconds for the imports, on a busy machine; at the rendezvous a rank waits for 120 s."""


@pytest.mark.parametrize("kind", ["raised", "terminated"])
def test_ranks_end_whose_first_process_ended_before_they_came(kind: str, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), kind]
    with log.open("w") as out:
        ended = subprocess.run(
            command, env=environment(tmp_path), stdout=out, stderr=out, check=False, timeout=240
        )
    assert ended.returncode == (1 if kind == "raised" else -15)
    deadline = time.monotonic() + LIMIT
    while marked(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    said = log.read_text()
    assert not marked(tmp_path), said
    assert "the process that started this process" in said
    assert "did not come to the rendezvous" not in said
