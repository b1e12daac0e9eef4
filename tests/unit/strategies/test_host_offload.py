"""Which optimizers are moved to the host, are left as they are, or are refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.components.host_offload import is_offloaded

Make = Callable[[nn.Parameter], torch.optim.Optimizer]
OTHERS: dict[str, tuple[bool, Make, str]] = {
    "another optimizer": (True, lambda p: torch.optim.SGD([p]), "a strategy without offloading"),
    "a third moment": (True, lambda p: torch.optim.Adam([p], amsgrad=True), "Use amsgrad=False"),
    "manual steps": (False, lambda p: torch.optim.AdamW([p]), "automatic_optimization=True"),
}
MORE: dict[str, Any] = {
    "a file": {"offload_optimizer": "nvme:/disk"},
    "a delay": {"delayed_update": 0},
    "short moments": {"state_dtype": "bfloat16"},
}


def ask(automatic: bool, make: Make, device: str, **options: Any) -> bool:
    module = pl.LightningModule()
    module.automatic_optimization = automatic
    optimizers = [make(nn.Parameter(torch.zeros(2)))]
    return is_offloaded(module, optimizers, OffloadOptions(**options), torch.device(device))


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_kernel_computes_stays_on_the_cpu_and_is_refused_elsewhere(name: str) -> None:
    automatic, make, says = OTHERS[name]
    assert not ask(automatic, make, "cpu")
    with pytest.raises(ConfigurationError, match=says):
        ask(automatic, make, "cuda")


@pytest.mark.parametrize("name", MORE)
def test_what_no_kernel_computes_is_refused_where_more_is_asked_for(name: str) -> None:
    automatic, make, says = OTHERS["another optimizer"]
    with pytest.raises(ConfigurationError, match=says):
        ask(automatic, make, "cpu", **MORE[name])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adam_is_moved_with_any_options(device: str) -> None:
    for options in ({}, *MORE.values()):
        assert ask(True, lambda p: torch.optim.AdamW([p]), device, **options)
