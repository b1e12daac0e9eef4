"""A checkpoint that is one file is the file that Lightning would have written on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_par
from lightning_par.models import GPTModule
from tests.support.resharding import differences, PLAIN, run_layout

pytestmark = pytest.mark.contract


def shape_of(value: Any) -> Any:
    """Keys in their order, types, dtypes and shapes."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return [(key, shape_of(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(entry) for entry in value]
    return type(value)


def assert_holds(module: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Compare with a module in float32, as it is made."""
    rounded = {name: value.float() for name, value in weights.items()}
    assert differences(dict(module.state_dict()), rounded) == []


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a plain Trainer has written."""
    folder = tmp_path_factory.mktemp("plain")
    run_layout(PLAIN, folder, steps=1, save_at=1, save_to=folder / "a.ckpt")
    return torch.load(folder / "a.ckpt", weights_only=True)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 offload"])
def test_plain_torch_and_lightning_read_it(layout: str, wanted: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saved = run_layout(layout, tmp_path, steps=1, save_at=1, save_to=path)[0]["saved"]
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == list(wanted)
        assert found["global_step"] == wanted["global_step"]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
            assert shape_of(found[key]) == shape_of(wanted[key]), key
        assert differences(found["state_dict"], saved["weights"]) == []
        (optimizer,) = found["optimizer_states"]
        assert differences(optimizer["state"], saved["optimizers"][0]["state"]) == []
    module = GPTModule.load_from_checkpoint(path)
    again = lightning_par.load_from_checkpoint(GPTModule, path)
    for made in (module, again):
        assert_holds(made, saved["weights"])
    (resumed,) = run_layout(PLAIN, tmp_path, steps=2, source=path)
    assert differences(resumed["loaded"], saved) == []


def test_module_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    options = {"save_at": 1, "save_to": path, "checkpoint_format": "folder"}
    saved = run_layout("one", tmp_path, steps=1, **options)[0]["saved"]
    made = lightning_par.load_from_checkpoint(GPTModule, path)
    assert_holds(made, saved["weights"])
