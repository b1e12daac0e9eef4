"""Files of strategies/, callbacks/ and models/: LightningCLI takes each of them by its name."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_par import callbacks, strategies
from lightning_par.commands.prediction.run_config import read_settings
from lightning_par.commands.rehearse import rehearse_config
from lightning_par.models.bert.config import BERT_PRESETS
from lightning_par.models.gpt.config import PRESETS
from lightning_par.models.mixtral.config import MIXTRAL_PRESETS
from tests.support.cli_scripts import command_line, run_command
from tests.support.exhaustive import some
from tests.support.ranks.api import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "configs" / "gpt.yaml"
PIECES = {
    kind: {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / kind).glob("*.yaml")}
    for kind in ("strategies", "callbacks", "models")
}
RANKS = {"tp2_pp2": 4, "pp2_ep2": 4}
"""Of strategies that need more than two devices."""
NAMED = "\n".join(path.read_text() for path in (ROOT / "configs").glob("*.yaml"))
"""What the configurations name is run by their own test."""
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_model_summary=false",
    "--data.max_bytes=100000",
]

pytestmark = pytest.mark.contract


def of_class(piece: dict[str, Any]) -> str:
    return str(piece["class_path"].rpartition(".")[2])


def test_there_is_a_file_for_each_strategy_callback_and_preset() -> None:
    of_strategies = {of_class(piece) for piece in PIECES["strategies"].values()}
    assert of_strategies == set(strategies.__all__) - {"MeshStrategy"}
    of_callbacks = {of_class(piece) for piece in PIECES["callbacks"].values()}
    assert of_callbacks == set(callbacks.__all__)
    presets = [
        (of_class(piece), piece["init_args"]["preset"])
        for piece in PIECES["models"].values()
        if of_class(piece) != "HuggingFaceModule"
    ]
    known = {"GPTModule": PRESETS, "BertModule": BERT_PRESETS, "MixtralModule": MIXTRAL_PRESETS}
    assert sorted(presets) == sorted((kind, name) for kind in known for name in known[kind])


@pytest.mark.parametrize("kind", PIECES)
def test_every_file_says_in_its_head_what_it_is(kind: str) -> None:
    for path in (ROOT / kind).glob("*.yaml"):
        assert re.match(
            r"# [A-Z].*\.\n(# .*\n)*class_path: |(# .*\n)+class_path: ", path.read_text()
        )


NOT_NAMED = [
    name
    for name in sorted({*PIECES["strategies"]} - {"islands"})  # which start processes of their own
    if f"../strategies/{name}.yaml" not in NAMED
]


@pytest.mark.parametrize("name", NOT_NAMED)
def test_a_strategy_that_no_configuration_names_runs_in_place_of_the_configured_one(
    name: str, tmp_path: Path
):
    ranks = RANKS.get(name, 2)
    words = ["fit", f"--config={BASE}", f"--trainer.strategy={ROOT}/strategies/{name}.yaml"]
    said = run_ranks(run_command, ranks, tmp_path, *words, *SHORT, timeout=150)
    assert "`max_steps=2` reached" in "\n".join(said[0])


def test_islands_run_with_their_monitor(tmp_path: Path) -> None:
    """By a command line of its own, as the islands start each other."""
    words = [f"--config={BASE}", f"--trainer.strategy={ROOT}/strategies/islands.yaml"]
    words += [f"--trainer.callbacks+={ROOT}/callbacks/island_monitor.yaml"]
    done = command_line(tmp_path, "fit", *words, *SHORT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "`max_steps=2` reached" in done.stdout + done.stderr


def test_callbacks_are_added_to_those_of_the_configuration(tmp_path: Path):
    """All that need neither experts, islands nor another strategy, at once."""
    left_out = {"expert_balance", "island_monitor", "first_step_proof"}
    others = sorted({*PIECES["callbacks"]} - left_out)
    others.remove("full_activation_checkpointing")  # a run has one of these two
    words = ["fit", f"--config={BASE}", "--trainer.devices=2"]
    words += [f"--trainer.callbacks+={ROOT}/callbacks/{name}.yaml" for name in others]
    words += [f"--trainer.strategy={ROOT}/strategies/pipeline_1f1b.yaml"]
    said = run_ranks(run_command, 2, tmp_path, *words, *SHORT, timeout=150)
    assert "`max_steps=2` reached" in "\n".join(said[0])
    (saved,) = tmp_path.rglob("config.yaml")
    written = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    assert {of_class(PIECES["callbacks"][name]) for name in others} <= set(map(of_class, written))


def test_the_first_step_of_another_strategy_is_proved(tmp_path: Path) -> None:
    words = ["fit", f"--config={BASE}", "--trainer.devices=2", "--trainer.strategy=ddp"]
    words += [f"--trainer.callbacks+={ROOT}/callbacks/first_step_proof.yaml"]
    said = run_ranks(run_command, 2, tmp_path, *words, *SHORT, timeout=150)
    assert "the first step of DDPStrategy on 2 ranks equals that of one process" in "\n".join(
        said[0]
    )


def test_settings_are_read_in_one_piece(tmp_path: Path) -> None:
    settings = read_settings(BASE)
    trainer = settings["trainer"]
    assert trainer["strategy"] == PIECES["strategies"]["zero1"]
    assert trainer["callbacks"] == [PIECES["callbacks"]["throughput_monitor"]]
    assert settings["model"] == PIECES["models"]["gpt_tiny"]
    written = tmp_path / "names.yaml"
    written.write_text("trainer: {strategy: hybrid3d, callbacks: null}\nmodel: own.Module\n")
    assert read_settings(written)["trainer"]["strategy"] == "hybrid3d"
    assert read_settings(written)["model"] == "own.Module"


SAMPLED = ["bert_large", "llama3_405b", "mixtral_8x22b"]
"""One of each class; the others differ in their sizes."""
MODELS = sorted({*PIECES["models"]} - {"huggingface_llama_tiny"})


@pytest.mark.parametrize("name", some(MODELS, [n for n in MODELS if n not in SAMPLED]))
def test_a_rank_of_each_model_is_rehearsed_with_one_layer(name: str) -> None:
    kind = of_class(PIECES["models"][name])
    base = ROOT / "configs/bert_tensor_parallel_2.yaml" if kind == "BertModule" else BASE
    words = [f"--config={base}", f"--model={ROOT}/models/{name}.yaml"]
    words += ["--model.overrides.num_layers=1", "--trainer.precision=bf16-mixed"]
    words += [f"--trainer.strategy={ROOT}/strategies/tensor_parallel.yaml"]
    devices = 5 if name == "gpt2_xl" else 2  # it has 25 heads
    words += ["--trainer.callbacks=null"]
    found = rehearse_config(words, num_nodes=1, devices=devices, rank=1)
    assert "tp 1" in found.place
    assert found.parameters > 0
