"""What is refused about Hugging Face models and folders, and what the message says."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par import cli
from lightning_par.errors import ConfigurationError
from lightning_par.huggingface.attention import _attend, _check_packing
from tests.folders import write_folder

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
