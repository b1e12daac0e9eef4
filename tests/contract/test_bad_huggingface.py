"""What is refused about Hugging Face models and folders, and what the message says."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import get_peft_model, LoraConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

import lightning_par
from lightning_par import cli
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.engine.pipeline.captured_outputs import keep_outputs
from lightning_par.errors import CheckpointError, ConfigurationError, PlanError
from lightning_par.huggingface import export_folder, MODEL_STATE
from lightning_par.huggingface.attention import _attend
from lightning_par.huggingface.export import _check_names
from lightning_par.huggingface.weights import _join
from lightning_par.models import HuggingFaceModule
from tests.support.checkpoints import write_folder
from tests.support.parity import quiet_trainer

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
        (["--out", "a", "--below", "model"], "--below and --trust are not supported"),
        (["--out", "a", "--max-shard-gb", "0"], "--max-shard-gb 0.0 must be more than 0"),
        (
            ["--out", "a"],
            "does not hold exactly one Hugging Face model. Use --out NAME.safetensors",
        ),
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
    with pytest.raises(
        CheckpointError, match=r"transformers has no class OwnModel.*Use --out NAME"
    ):
        export_folder(reader, tmp_path / "out", max_shard_bytes=100)
    assert not (tmp_path / "out").exists()


def _small_llama() -> Any:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class Adapted(pl.LightningModule):
    """A model with adapters that have values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(_small_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
        torch.nn.init.normal_(self.model.get_parameter(_ADAPTER))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


_ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks it
def test_adapters_are_exported_once_they_are_merged_as_the_message_says(tmp_path: Path) -> None:
    rows, path = torch.arange(8).view(2, 4), tmp_path / "a.ckpt"
    trainer = quiet_trainer(devices=1, strategy="hybrid3d", max_steps=1)
    samples: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer.fit(Adapted(), DataLoader(samples, 2))
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError) as refused:
        export_folder(CheckpointReader(path), tmp_path / "out", max_shard_bytes=100)
    text = str(refused.value)
    assert "1 weights are missing (model.layers.0.self_attn.q_proj.weight)" in text
    assert "3 weights would be left out (model.layers.0.self_attn.q_proj.base_layer.weight" in text
    assert "module.model.merge_and_unload().save_pretrained(folder)" in text
    module = lightning_par.load_from_checkpoint(Adapted, path)
    module.eval()
    wanted = module.model(input_ids=rows).logits
    module.model.merge_and_unload().save_pretrained(tmp_path / "out")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(found(input_ids=rows).logits, wanted, rtol=0, atol=1e-5)


def test_weights_of_another_shape_than_the_configuration_gives_are_not_exported(
    tmp_path: Path,
) -> None:
    model = _small_llama()
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1))
    stored = {name: reader.weights().find("table") for name in model.state_dict()}
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight has the shape"):
        _check_names(model, stored, (), {"prefix": ""})


def test_weights_that_have_to_be_computed_are_not_read_in_parts(tmp_path: Path) -> None:
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1))
    converter = WeightConverter(["table"], ["left", "right"], [Chunk(dim=0)])
    sources = {"table": [reader.weights().find("table")]}
    with pytest.raises(
        CheckpointError, match=r"left cannot be loaded: .* from the tensors table .* by Chunk"
    ):
        _join("left", converter, sources)


def test_what_is_captured_has_to_be_a_tensor() -> None:
    block = torch.nn.Sequential(torch.nn.Flatten())
    keep_outputs(block, {"0": 0})
    block[0].register_forward_hook(lambda *_: None)
    block(torch.zeros(2, 3))
    other = torch.nn.Sequential(torch.nn.Module())
    other[0].forward = lambda: "text"  # type: ignore[method-assign]
    keep_outputs(other, {"0": 0})
    with pytest.raises(PlanError, match=r"names '0', .* This output is a str, and not a tensor\."):
        other[0]()
    other[0].forward = lambda: ({}, torch.zeros(2))  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"its entry 0 is a dict, .* as in captured=\{'0': 1\}; or"):
        other[0]()
    again = torch.nn.Sequential(other[0])
    again[0]._forward_hooks.clear()
    keep_outputs(again, {"0": 1})
    again[0]()


def test_module_needs_a_task_of_transformers() -> None:
    with pytest.raises(ConfigurationError, match=r"transformers has no class AutoModelForPoetry"):
        HuggingFaceModule(task="Poetry")


def test_verify_needs_a_step(monkeypatch: Any, capsys: Any) -> None:
    status, error = command(monkeypatch, capsys, "verify", "--steps=0")
    assert status == 1
    assert "--steps 0 must be 1 or more" in error


def test_dropped_attention_weights_are_refused_on_divided_sequences() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        ConfigurationError, match=r"Linear applies dropout=0\.1 to attention probabilities"
    ):
        _attend(torch.nn.Linear(1, 1), x, x, x, None, dropout=0.1)
