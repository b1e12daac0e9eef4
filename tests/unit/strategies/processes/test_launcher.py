"""Where no script can be run again, several processes are refused; one is not."""

import os
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.processes.launcher import PreflightLauncher


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, which Lightning looks for when it is imported."""
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    monkeypatch.setattr(f"{connector}._IS_INTERACTIVE", True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def trainer(devices: int, strategy: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("strategy", ["tensor_parallel", "hybrid3d", "auto_parallel"])
def test_prompt_gets_the_lines_that_work_for_several_devices(strategy: str) -> None:
    said = r"2 devices need 2 processes.*`%%writefile train\.py`, and run `!python train\.py`"
    with pytest.raises(ConfigurationError, match=said):
        trainer(2, strategy)
    assert trainer(1, strategy).world_size == 1


@pytest.mark.usefixtures("prompt")
def test_prompt_whose_processes_another_launcher_started_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert trainer(2, "tensor_parallel").local_rank == 1


def test_processes_that_cannot_be_started_leave_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unreachable(LightningEnvironment):
        """Fails where Lightning asks for what it tells the other processes."""

        @property
        def main_address(self) -> str:
            raise OSError("no address")

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = dict(os.environ)
    launcher = PreflightLauncher(Unreachable(), 2, 1, lambda *_: None, lambda _: None)
    with pytest.raises(OSError, match="no address"):
        launcher.launch(print)
    assert dict(os.environ) == before
