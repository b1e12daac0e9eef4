"""Where no script can be run again, several processes are refused; one is not."""

import sys
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_par.errors import ConfigurationError


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
    said = r"2 devices need 2 processes.*`%%writefile train\.py` and run `!python train\.py`"
    with pytest.raises(ConfigurationError, match=said):
        trainer(2, strategy)
    assert trainer(1, strategy).world_size == 1


@pytest.mark.usefixtures("prompt")
def test_prompt_whose_processes_another_launcher_started_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert trainer(2, "tensor_parallel").local_rank == 1
