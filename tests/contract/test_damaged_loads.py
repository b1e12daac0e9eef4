"""What is damaged, or no checkpoint, is one error of ours, whoever asks for it."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_par
from lightning_par.errors import CheckpointError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.unit.checkpoint.test_damage import spoil

pytestmark = pytest.mark.contract

STATE = "state-00000-of-00001.json"


def trainer(form: str = "file", **options: Any) -> pl.Trainer:
    """A Trainer on one device; "plain" is one without this package."""
    strategy: Any = "auto"
    if form != "plain":
        strategy = lightning_par.Hybrid3DStrategy(checkpoint_format=form)
    return quiet_trainer(devices=1, strategy=strategy, **options)


def load(path: Path) -> None:
    lightning_par.load_from_checkpoint(ToyModule, path)


def fit(path: Path) -> None:
    trainer(max_steps=5).fit(
        ToyModule(), loader(ToyData(8), 2), loader(ToyData(8), 2), ckpt_path=path
    )


READERS = [load, fit]
FORMS = ["file", "folder", "plain"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each form."""
    folder = tmp_path_factory.mktemp("saved")
    for form in FORMS:
        made = trainer(form, max_steps=4)
        made.fit(ToyModule(), loader(ToyData(8), 2), loader(ToyData(8), 2))
        made.save_checkpoint(folder / form)
    return folder


@pytest.fixture
def paths(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(saved, tmp_path / "copy")


def refusal(read: Callable[[Path], None], path: Path) -> str:
    """The error of ours; "" if the checkpoint is loaded. Any other error fails the test."""
    try:
        read(path)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("form", FORMS)
def test_cut_file_is_refused(form: str, read: Callable[[Path], None], paths: Path) -> None:
    path = paths / form
    file = path / STATE if path.is_dir() else path
    data = file.read_bytes()
    for length in (0, 3, 1000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        assert "LP502" in refusal(read, path), length
    file.write_bytes(bytes(len(data)))
    assert "LP502" in refusal(read, path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("form", ["file", "plain"])
def test_flipped_bits_are_refused_or_do_no_harm(
    form: str, read: Callable[[Path], None], paths: Path
) -> None:
    """Not by an error of torch, such as that of a header between the tensors."""
    path = paths / form
    data, seeded = path.read_bytes(), random.Random(1)
    for at in (30, *(seeded.randrange(len(data)) for _ in range(12))):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        said = refusal(read, path)
        assert not said or "LP502" in said, (at, said)


def test_a_damaged_pickle_is_not_said_to_need_trust(paths: Path) -> None:
    path = paths / "plain"
    data = path.read_bytes()
    at = data.index(b"torch._utils")
    path.write_bytes(data[:at] + b"trust" + data[at + 5 :])
    for read in READERS:
        assert "LP502" in refusal(read, path)
    path.write_text("not a checkpoint")
    for read in READERS:
        assert "LP502" in refusal(read, path)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_checkpoint_is_refused(read: Callable[[Path], None], paths: Path) -> None:
    path = paths / "other"
    whole = torch.load(paths / "plain", weights_only=True)
    for value in ([1], {"a": 1}, whole["state_dict"], {**whole, "state_dict": None}):
        torch.save(value, path)
        assert "LP50" in refusal(read, path)
    torch.save({k: v for k, v in whole.items() if k != "state_dict"}, path)
    assert "has no entry 'state_dict'" in refusal(read, path)
    torch.save({**whole, "hyper_parameters": {"kind": Path}}, path)
    assert "LP504" in refusal(read, path)
    path.unlink()
    os.mkfifo(path)
    assert "a pipe or a device" in refusal(read, path)
    path.unlink()
    path.mkdir()
    assert "it has neither a manifest.json nor a model.safetensors" in refusal(read, path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "none.ckpt does not exist" in refusal(load, tmp_path / "none.ckpt")


def test_damaged_own_state_is_refused(paths: Path) -> None:
    """With checksums that fit; it was a KeyError or a TypeError."""
    folder = paths / "folder"
    whole = json.loads((folder / STATE).read_bytes())
    own = whole["lightning_par"]
    wrong: list[Any] = [{k: v for k, v in whole.items() if k != "lightning_par"}]
    wrong += [{**whole, key: 3} for key in ("lightning_par", "loops", "callbacks", "lr_schedulers")]
    for key in ("random", "seed", "evaluations"):
        wrong.append({**whole, "lightning_par": {k: v for k, v in own.items() if k != key}})
        wrong.append({**whole, "lightning_par": {**own, key: "x"}})
    for value in wrong:
        spoil(folder, STATE, value)
        assert re.search("no valid content|not a valid checkpoint", refusal(fit, folder))
    spoil(folder, STATE, whole)
    assert refusal(fit, folder) == ""
