"""What is refused about Hugging Face models and folders, and what the message says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Chunk, WeightConverter

from lightning_par import cli
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.engine.pipeline.captured_outputs import keep_outputs
from lightning_par.errors import CheckpointError, ConfigurationError, PlanError
from lightning_par.huggingface import export_folder, MODEL_STATE
from lightning_par.huggingface.attention import _attend, _check_packing
from lightning_par.huggingface.weights import _join
from lightning_par.models import HuggingFaceModule
from tests.support.checkpoints import write_folder

pytestmark = pytest.mark.contract


def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: object) -> tuple[int, str]:
    """Run the command line; give its status and its errors."""
    monkeypatch.setattr(sys, "argv", ["lightning-par", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "a.safetensors"], "--format huggingface writes a folder"),
        (["--out", "a", "--below", "model"], "--below and --trust are for files"),
        (["--out", "a", "--max-shard-gb", "0"], "--max-shard-gb 0.0 must be more than 0"),
        (["--out", "a"], "holds no Hugging Face model, or several: use --out NAME.safetensors"),
    ],
)
def test_export_refuses(
    more: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = write_folder(tmp_path / "a.ckpt", 1, state={"lightning_par": {}})
    monkeypatch.chdir(tmp_path)
    words = ["export", "--ckpt", path, "--format", "huggingface", *more]
    status, error = command(monkeypatch, capsys, *words)
    assert status == 1
    assert message in error
    assert not (tmp_path / "a").exists()


def test_model_that_transformers_does_not_have_is_not_exported(tmp_path: Path) -> None:
    found = {"prefix": "", "config": json.dumps({"architectures": ["OwnModel"]})}
    state = {"lightning_par": {MODEL_STATE: found}}
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1, state=state))
    with pytest.raises(CheckpointError, match="transformers has no OwnModel: use --out NAME"):
        export_folder(reader, tmp_path / "out", max_shard_bytes=100)
    assert not (tmp_path / "out").exists()


def test_weights_that_have_to_be_computed_are_not_read_in_parts(tmp_path: Path) -> None:
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1))
    converter = WeightConverter(["table"], ["left", "right"], [Chunk(dim=0)])
    sources = {"table": [reader.weights().find("table")]}
    with pytest.raises(CheckpointError, match="left is computed from table by Chunk"):
        _join("left", converter, sources)


def test_what_is_captured_has_to_be_a_tensor() -> None:
    block = torch.nn.Sequential(torch.nn.Flatten())
    keep_outputs(block, {"0": 0})
    block[0].register_forward_hook(lambda *_: None)
    block(torch.zeros(2, 3))
    other = torch.nn.Sequential(torch.nn.Module())
    other[0].forward = lambda: "text"  # type: ignore[method-assign]
    keep_outputs(other, {"0": 0})
    with pytest.raises(PlanError, match="captured: 0 gives a str, not a tensor"):
        other[0]()


def test_module_needs_a_task_of_transformers() -> None:
    with pytest.raises(ConfigurationError, match="transformers has no AutoModelForPoetry"):
        HuggingFaceModule(task="Poetry")


def test_verify_needs_a_step(monkeypatch: Any, capsys: Any) -> None:
    status, error = command(monkeypatch, capsys, "verify", "--steps=0")
    assert status == 1
    assert "--steps 0 must be 1 or more" in error


def test_packed_rows_are_not_divided() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ConfigurationError, match="start again inside a row"):
        _check_packing({"position_ids": positions})
    _check_packing({"position_ids": positions, "attention_mask": torch.ones(1, 5)})
    _check_packing({"position_ids": torch.arange(5)[None] + 3})


def test_dropped_attention_weights_are_refused_on_divided_sequences() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigurationError, match=r"Linear drops out attention weights \(0.1\)"):
        _attend(torch.nn.Linear(1, 1), x, x, x, None, dropout=0.1)
