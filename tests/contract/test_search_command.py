"""``lightning-par search`` and ``forecast``: text, JSON, and a file that ``fit`` runs."""

import contextlib
import json
import os
import re
import select
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_par.commands.prediction.trial import run_process
from tests.support.cli_scripts import command, run_command
from tests.support.ranks.api import run_ranks

pytestmark = [
    pytest.mark.contract,
    # Lightning calls a method that jsonargparse has renamed.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

ROOT = Path(__file__).resolve().parents[2]

TINY = """
trainer:
  accelerator: cpu
  devices: 1
  strategy: hybrid3d
  max_steps: 2
  limit_val_batches: 1
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks:
    - class_path: lightning_par.callbacks.ActivationCheckpointing
      init_args: {mode: full}
model:
  class_path: lightning_par.models.GPTModule
  init_args: {preset: tiny}
data:
  class_path: lightning_par.models.TextDataModule
  init_args: {length: 64, batch_size: 8, max_bytes: 100000}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.distributed
def test_fit_runs_the_layout_that_search_wrote(
    config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pinned = "{class_path: lightning_par.Hybrid3DStrategy, init_args: {tensor_parallel_size: 4}}"
    asked = TINY.replace("devices: 1", "devices: 4").replace("hybrid3d", pinned)  # not what is here
    config.write_text(asked)
    out = tmp_path / "found.yaml"
    words = ("--device", "h100", "--nodes", 1, "--devices", 2, "--samples", 16, "--out", out)
    words = (*words, "--length", 32, "--data.init_args.max_bytes=90000")
    status, said, _ = command(monkeypatch, capsys, "search", "--config", config, *words)
    assert status == 0
    assert re.search(r"step, s +tokens/s +MFU +GiB +bubble +layout", said)
    assert "why its neighbors lost:" in said
    assert f"written: {out}" in said
    assert f"lightning-par fit --config {out} --data.init_args.max_bytes=90000" in said
    found = yaml.safe_load(out.read_text())
    chosen = found["trainer"]["strategy"]["init_args"]
    sizes = [chosen[f"{axis}_parallel_size"] for axis in ("tensor", "pipeline", "context", "data")]
    assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == found["trainer"]["devices"] == 2
    assert found["data"]["init_args"]["length"] == 32
    samples = found["data"]["init_args"]["batch_size"] * sizes[3]
    assert samples * found["trainer"]["accumulate_grad_batches"] == 16
    assert "callbacks" not in found["trainer"] or not found["trainer"]["callbacks"]
    folder = tmp_path / "run"
    folder.mkdir()
    assert found["trainer"]["accelerator"] == "gpu"
    words = ("fit", "--config", str(out), "--trainer.accelerator=cpu")
    said = run_ranks(run_command, 2, folder, *words)
    assert any("`max_steps=2` reached" in line for line in said[0])


@pytest.mark.parametrize("device", ["a100-80", "a100-40"])
def test_answers_to_13b_on_16_a100_are_those_of_the_site(
    config: Path, monkeypatch: Any, capsys: Any, device: str
) -> None:
    words = ("--model.init_args.preset=gpt3-13b", "--length", 2048, "--samples", 256)
    words = (*words, "--device", device, "--nodes", 2, "--devices", 8)
    words = (*words, "--trainer.precision", "bf16-mixed")
    status, said, _ = command(monkeypatch, capsys, "search", "--config", config, *words)
    assert status == 0
    site = json.loads((ROOT / "docs" / "site" / "answers.json").read_text())
    (known,) = (
        one
        for one in site
        if (one["model"], one["device"], one["nodes"]) == ("gpt3-13b", device, 2)
    )
    first, plain = (f"{known[name]:.4g}" for name in ("fastest_seconds", "plain_seconds"))
    assert re.search(rf"\n +{first} .* {re.escape(known['fastest'])}\n", said)
    assert f"plain answer (docs/which_layout.md): {known['plain']}\n  {plain} s, +" in said
    status, said, _ = command(monkeypatch, capsys, "search", "--config", config, *words, "--json")
    found = json.loads(said)
    assert status == 0
    assert found["plain"]["seconds"] == pytest.approx(known["plain_seconds"], abs=1e-3)
    assert "samples of a step: 256, from --samples" in found["sources"]


def test_forecast_takes_the_layout_of_the_configuration(
    config: Path, monkeypatch: Any, capsys: Any
) -> None:
    picture = config.with_name("layout.svg")
    words = ("--devices", 4, "--nodes", 2, "--json", "--trainer.strategy=pipeline_1f1b")
    words = (*words, "--picture", picture)
    status, said, _ = command(monkeypatch, capsys, "forecast", "--config", config, *words)
    found = json.loads(said)
    assert status == 0
    assert ">stage 7<" in picture.read_text()
    assert found["layout"]["sizes"]["pipeline"] == 8
    assert found["layout"]["recompute"] == "full"
    # 4 micro-batches for each of 8 ranks are more than the 8 samples of a batch.
    assert (found["layout"]["microbatches"], found["layout"]["micro_batch"]) == (8, 1)
    assert sum(found["time"].values()) == pytest.approx(found["seconds"])
    assert sum(found["memory"].values()) == pytest.approx(found["peak_bytes"])


def test_forecast_and_search_charge_padded_parts_of_experts(
    config: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = config.with_name("experts.yaml")
    words = ("--config", path, "--devices", 2, "--json")
    found = []
    # 8 samples of 64 tokens on each of two ranks choose 2 experts each.
    for rows in ("null", 512, 1024):
        options = f"data_parallel_size: 2, expert_parallel_size: 2, expert_max_rows: {rows}"
        kind = f"{{class_path: lightning_par.Hybrid3DStrategy, init_args: {{{options}}}}}"
        text = TINY.replace("GPTModule", "MixtralModule").replace("hybrid3d", kind)
        path.write_text(text.replace("devices: 1", "devices: 2"))
        status, said, _ = command(monkeypatch, capsys, "forecast", *words)
        assert status == 0
        found.append(json.loads(said))
    exact, same, double = (one["traffic"]["ep"] for one in found)
    assert (same, double) == (exact, 2 * exact)
    exact, same, double = (one["peak_bytes"] for one in found)
    assert exact == same < double
    status, said, _ = command(monkeypatch, capsys, "search", *words)
    layouts = [one["layout"] for one in json.loads(said)["best"]]
    assert status == 0
    assert {one["expert_max_rows"] for one in layouts if one["sizes"]["expert"] > 1} == {1024}


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_search_takes_a_run_without_a_strategy_of_this_package(
    strategy: str, config: Path, monkeypatch: Any, capsys: Any
) -> None:
    settings = yaml.safe_load(TINY)
    settings["trainer"] |= {"devices": 4, "strategy": strategy}
    config.write_text(yaml.safe_dump(settings))
    words = ("--config", config, "--device", "h100", "--json")
    status, said, _ = command(monkeypatch, capsys, "search", *words)
    assert status == 0
    best = json.loads(said)["best"][0]
    assert best["tokens_per_second"] * best["seconds"] == pytest.approx(8 * 4 * 64)  # 4 replicas


def test_forecast_says_what_does_not_fit(config: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ("--model.init_args.preset=gpt3-13b", "--device", "h100", "--devices", 1)
    status, said, _ = command(monkeypatch, capsys, "forecast", "--config", config, *words)
    assert status == 1
    assert re.search(
        r"does not fit: pipeline rank 0 needs \d+\.\d GiB, but 67\.1 GiB may be used", said
    )


def test_shapes_are_read_from_every_kind_of_model(
    config: Path, monkeypatch: Any, capsys: Any
) -> None:
    for model, data, samples in (
        ("BertModule", "SentenceDataModule", 8),
        ("MixtralModule", "TextDataModule", 8),
        ("HuggingFaceModule", "TextDataModule", 8),
    ):
        path = config.with_name(f"{model}.yaml")
        text = TINY.replace("GPTModule", model).replace("TextDataModule", data)
        if model == "HuggingFaceModule":
            sizes = (
                "{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 99}"
            )
            text = text.replace("{preset: tiny}", f"{{config: llama, overrides: {sizes}}}")
        path.write_text(text.replace(", max_bytes: 100000", ""))
        words = ("--config", path, "--devices", 2, "--json")
        status, said, _ = command(monkeypatch, capsys, "search", *words)
        assert status == 0
        layout = json.loads(said)["best"][0]["layout"]
        sizes = layout["sizes"]
        data_size = sizes["data_replicate"] * sizes["data_shard"]
        assert layout["micro_batch"] * layout["microbatches"] * data_size >= samples


def fit(rank: int, world: int, config: Path, folder: Path) -> dict[str, Any]:
    """Run ``fit`` and return the weights of the whole module."""
    from lightning_par.commands.parallel_cli import make_cli

    with contextlib.chdir(folder):
        model = make_cli(["fit", f"--config={config}"]).model
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize(("model", "ranks"), [("LoggedEncoder", 4), ("TorchEncoder", 2)])
def test_a_model_without_a_configuration_trains_as_found_like_one_process(
    model: str, ranks: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    settings = yaml.safe_load(TINY)
    trainer = settings["trainer"] | {"precision": "64-true", "max_steps": 3, "callbacks": []}
    trainer |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings["trainer"] = trainer | {"limit_val_batches": 0, "enable_model_summary": False}
    users = "tests.support.models.user_encoders"
    settings["model"] = {"class_path": f"{users}.{model}"}
    settings["data"] = {"class_path": f"{users}.LabeledTokens", "init_args": {"batch_size": 4}}
    asked, found, whole = (tmp_path / f"{name}.yaml" for name in ("asked", "found", "whole"))
    asked.write_text(yaml.safe_dump(settings))
    words = ("--config", asked, "--device", "cpu", "--devices", ranks, "--samples", 8)
    words = (*words, "--out", found, "--json")
    status, said, _ = command(monkeypatch, capsys, "search", *words)
    assert status == 0
    assert json.loads(said)["considered"] > 10
    results = run_ranks(fit, ranks, found, tmp_path)
    chosen = yaml.safe_load(found.read_text())
    assert chosen["trainer"]["accelerator"] == "cpu"
    replicas = chosen["trainer"]["strategy"]["init_args"]["data_parallel_size"]
    batches = chosen["trainer"]["accumulate_grad_batches"]
    assert chosen["data"]["init_args"]["batch_size"] * replicas * batches == 8
    settings["trainer"] |= {"strategy": "auto", "accumulate_grad_batches": batches}
    settings["data"]["init_args"] = {"batch_size": 8 // batches, "alone": replicas > 1}
    whole.write_text(yaml.safe_dump(settings))
    wanted = run_ranks(fit, 1, whole, tmp_path)[0]
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)


OF_A_USER = """
import torch
from lightning.pytorch import LightningDataModule


class Texts(LightningDataModule):
    def __init__(self, batch_size: int = 6, words: int = 48, file: str = "") -> None:
        super().__init__()
        self.of_batch, self.words, self.file = batch_size, words, file

    def train_dataloader(self):
        if self.file:
            open(self.file)
        tokens = torch.arange(40 * self.words).view(40, -1) % 99
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        return torch.utils.data.DataLoader(rows, batch_size=self.of_batch)
"""


@pytest.fixture
def of_a_user(config: Path, monkeypatch: Any) -> Path:
    """A configuration whose data module keeps its numbers to itself."""
    config.with_name("of_a_user.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(str(config.parent))
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    settings = yaml.safe_load(TINY)
    settings["trainer"] |= {"devices": 4, "accumulate_grad_batches": 2, "callbacks": []}
    kept = {"data_parallel_size": 4}
    strategy = {"class_path": "lightning_par.Hybrid3DStrategy", "init_args": kept}
    settings["trainer"]["strategy"] = strategy
    settings["data"] = {"class_path": "of_a_user.Texts"}
    config.write_text(yaml.safe_dump(settings))
    return config


def test_numbers_are_those_of_the_data_and_search_and_forecast_agree(
    of_a_user: Path, monkeypatch: Any, capsys: Any
) -> None:
    config = of_a_user
    out = config.with_name("found.yaml")
    words = ("--device", "a100-80", "--json")
    status, said, _ = command(
        monkeypatch, capsys, "search", "--config", config, *words, "--out", out
    )
    assert status == 0
    searched = json.loads(said)
    best = searched["best"][0]
    assert best["tokens_per_second"] * best["seconds"] == pytest.approx(6 * 4 * 2 * 48)
    assert [line.partition(";")[0] for line in searched["sources"]] == [
        "tokens of a sample: 48, from a step with the first batch",
        "samples of a replica's batch: 6, from the first batch",
        "devices: 4, as configured",
        "nodes: 1, where trainer.num_nodes is None",
        "precision: 32-true, from trainer.precision",
        "memory: 67.1 GiB of a device, 90% of what a100-80 has",
    ]
    status, said, _ = command(monkeypatch, capsys, "forecast", "--config", out, *words)
    assert status == 0
    names = "sizes", "micro_batch", "microbatches", "zero_stage"
    assert {name: json.loads(said)["layout"][name] for name in names} == {
        name: best["layout"][name] for name in names
    }
    assert json.loads(said)["seconds"] == best["seconds"]


def test_forecast_names_what_no_one_says_of_data_that_are_not_here(
    of_a_user: Path, monkeypatch: Any, capsys: Any
) -> None:
    config, words = of_a_user, ("--device", "a100-80", "--json")
    gone = ("--data.init_args.file", config.with_name("gone"))
    status, said, _ = command(monkeypatch, capsys, "forecast", "--config", config, *gone)
    assert status == 0
    assert "from the model's longest, as no step with a batch was traced; --length" in said
    assert "samples of a replica's batch: 6, from data.init_args.batch_size" in said
    assert "device: h100, assumed; --device names another" in said
    words = (*words, *gone, "--length", 48, "--data.init_args.batch_size=null")
    config.with_name("of_a_user.py").write_text(OF_A_USER.replace("batch_size: int", "batch_size"))
    monkeypatch.delitem(sys.modules, "of_a_user")
    status, _, said = command(monkeypatch, capsys, "forecast", "--config", config, *words)
    assert status == 1
    assert "the number of samples in a batch is not known" in said
    asked = (*words, "--samples", 48)  # the cure of that message
    status, said, _ = command(monkeypatch, capsys, "forecast", "--config", config, *asked)
    assert status == 0
    assert json.loads(said)["layout"]["micro_batch"] == 6
    asked = (*words, "--samples", 47)
    status, _, said = command(monkeypatch, capsys, "forecast", "--config", config, *asked)
    assert status == 1
    assert (
        "--samples 47 cannot be divided equally over 4 replicas and 2 accumulated batches" in said
    )


def test_mistakes_are_named(config: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ("--config", config, "--device", "h1000")
    status, _, said = command(monkeypatch, capsys, "search", *words)
    assert status == 1
    assert "there is no profile of the device 'h1000'; did you mean 'h100'?" in said
    own = config.with_name("own.yaml")
    own.write_text(TINY[: TINY.index("data:")] + "data: null\n")
    status, _, said = command(monkeypatch, capsys, "search", "--config", own)
    assert status == 1
    assert "with data: null the model makes its own data loader" in said
    for words, why in (
        (("--try", 3, "--nodes", 2), "--try 3 trains layouts on this machine, but --nodes 2 asks"),
        (("--picture", "found.jpg"), "path='found.jpg' must have one of the suffixes"),
        (("--try", -1), "--try -1 must be 0 or more layouts"),
    ):
        status, _, said = command(monkeypatch, capsys, "search", "--config", config, *words)
        assert status == 1
        assert why in said
    for strategy, why in (
        (
            "auto_parallel",
            "auto_parallel chooses the parallel sizes when trainer.fit sets up the model",
        ),
        ("ddp", "this command needs a strategy of lightning_par"),
    ):
        words = ("--config", config, "--devices", 2, f"--trainer.strategy={strategy}")
        status, _, said = command(monkeypatch, capsys, "forecast", *words)
        assert status == 1
        assert why in said


@pytest.mark.distributed
def test_the_fastest_of_the_first_layouts_is_found_by_training(
    config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    here, temporary, out = (tmp_path / name for name in ("here", "temporary", "found.yaml"))
    here.mkdir()
    temporary.mkdir()
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(here)
    saving = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    saving["init_args"] = {"dirpath": str(here / "saved"), "every_n_train_steps": 1}
    settings = yaml.safe_load(TINY)
    settings["trainer"]["callbacks"].append(saving)
    settings["model"]["class_path"] = "tests.support.models.refusing.RefusesZero1"
    config.write_text(yaml.safe_dump(settings))
    words = ("search", "--config", config, "--device", "cpu", "--devices", 2, "--samples", 8)
    status, said, _ = command(
        monkeypatch, capsys, *words, "--try", 2, "--keep", 1, "--out", out, "--json"
    )
    assert status == 0
    refused, trained = json.loads(said)["tried"]
    assert "zero 1" in refused["layout"]
    assert refused["seconds"] is None
    assert "not with ZeRO stage 1" in refused["problem"]
    assert trained["problem"] == ""
    assert 1e-4 < trained["seconds"] < 60
    chosen = yaml.safe_load(out.read_text())["trainer"]
    assert f"zero {chosen['strategy']['init_args']['zero_stage']}" in trained["layout"]
    assert chosen["max_steps"] == 2  # the run is the user's
    assert [c["class_path"] for c in chosen["callbacks"]] == [saving["class_path"]]
    status, _, said = command(monkeypatch, capsys, *words, "--try", 1, "--try-seconds", 0.01)
    assert status == 1
    assert "--try 1: none of the layouts that were tried could train on this machine." in said
    assert re.search(r"- .*zero 1.*: it had not ended after 0\.01 s", said)
    assert not [*here.iterdir(), *temporary.iterdir()]


def test_what_a_trial_started_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    inner = f"import signal; held = open({str(fifo)!r}, 'w'); print(1, flush=True); signal.pause()"
    outer = (
        "import subprocess, sys; "
        f"inner = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE); "
        "inner.stdout.read(1); sys.exit(3)"
    )
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run_process([sys.executable, "-c", outer], tmp_path / "log", 60.0) == 3
        assert select.select([end], [], [], 30.0)[0]  # nobody holds the other end any more
        assert os.read(end, 1) == b""
    finally:
        os.close(end)
