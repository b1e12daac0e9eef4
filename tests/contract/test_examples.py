"""The scripts in examples/ run as they stand."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_par import cli
from tests.support.cli_scripts import run_script
from tests.support.ranks.api import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FINE_TUNE = ROOT / "examples" / "finetune_huggingface.py"
END_TO_END = ROOT / "examples" / "huggingface_end_to_end.py"

pytestmark = pytest.mark.contract


def test_fine_tuned_folder_is_read_by_transformers(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert len(FINE_TUNE.read_text().splitlines()) < 40
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    before = transformers.AutoModelForCausalLM.from_config(config)
    before.save_pretrained(tmp_path / "base")
    printed = run_ranks(run_script, 2, FINE_TUNE, tmp_path, str(tmp_path / "base"), timeout=120)
    (words,) = re.findall(r"^lightning-par (.*)$", printed[0], re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-par", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr().err
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    row = torch.tensor([list(FINE_TUNE.read_bytes()[:32])])
    with torch.no_grad():
        losses = [float(m.eval()(input_ids=row, labels=row).loss) for m in (before, after)]
    assert losses[1] < losses[0] - 0.01


def test_text_becomes_a_model_that_writes(tmp_path: Path) -> None:
    words = ["--steps", "4", "--files", "3", "--out", str(tmp_path / "run")]
    printed = run_ranks(run_script, 2, END_TO_END, tmp_path, *words, timeout=150)
    assert "one process writes: def main(" in printed[0]
    assert "writes" not in printed[1]
    names = {path.name for path in (tmp_path / "run" / "writer").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
