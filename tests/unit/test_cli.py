import sys
from pathlib import Path

import pytest
import yaml

from lightning_par.cli import main
from lightning_par.commands.prediction.run_config import configure

# Lightning calls a method that jsonargparse has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["lightning-par"])


def run(args: list[str]) -> None:
    sys.argv[1:] = args
    main()


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        run(args)
    assert isinstance(stop.value.code, int)
    return stop.value.code, capsys.readouterr().err


def test_print_config_gives_a_config_that_parses_to_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def printed(*args: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run(["fit", *args, "--print_config"])
        assert not stop.value.code
        return capsys.readouterr().out

    first = printed("--model.preset", "gpt2", "--data.length", "7")
    config = yaml.safe_load(first)
    assert config["model"]["class_path"] == "lightning_par.models.GPTModule"
    assert config["model"]["init_args"]["preset"] == "gpt2"
    assert config["data"]["init_args"]["length"] == 7
    (tmp_path / "a.yaml").write_text(first)
    assert printed("--config", str(tmp_path / "a.yaml")) == first
    assert yaml.safe_load(printed("--data", "null"))["data"] is None


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ("trainer: {max_stepz: 3}", ["option 'trainer.max_stepz'", "did you mean 'max_steps'?"]),
        ("model: {init_args: {presett: x}}", ["'presett' is not", "did you mean 'preset'?"]),
        ("data: {init_args: {length: x}}", ["length"]),
    ],
)
def test_config_typo_gives_one_short_error(
    config: str, texts: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "a.yaml").write_text(config)
    code, error = refused(["fit", "--config", str(tmp_path / "a.yaml")], capsys)
    assert code == 2
    assert all(text in error for text in texts), error
    assert len(error.splitlines()) <= 8, error
    assert "NoneType" not in error


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--model.preset", "gpt22"], "preset 'gpt22' is none of tiny"),
        (["--trainer.strategy", "ddpp"], "strategy='ddpp' is not registered; did you mean 'ddp'?"),
        (["--data.batch_size", "0"], "batch_size=0 must be 1 or more"),
    ],
)
def test_configuration_that_cannot_run_gives_its_own_error(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    code, error = refused(["fit", *args], capsys)
    assert code == 1
    assert f"lightning-par: error: {text}" in error or text in error
    assert "Traceback" not in error


def test_fit_writes_its_config_also_where_one_is_already(tmp_path: Path):
    args = [
        "fit",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--model.overrides={num_layers: 1}",
        "--data.max_bytes=20000",
        "--data.length=16",
    ]
    for _ in range(2):
        run(args)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["model"]["init_args"]["overrides"] == {"num_layers": 1}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_says_its_command_and_ranks_and_parses(
    path: Path, capsys: pytest.CaptureFixture[str]
):
    text = path.read_text()
    assert f"lightning-par fit --config configs/{path.name}" in text
    assert f"# Ranks: {yaml.safe_load(text)['trainer']['devices']} (" in text
    with pytest.raises(SystemExit) as stop:
        run(["fit", "--config", str(path), "--print_config"])
    assert not stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("in_a_file", [False, True])
def test_classes_in_the_current_folder_are_found_and_start_from_their_own_defaults(
    in_a_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Their arguments have names that those of the default model and data have too."""
    (tmp_path / "lying_here.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "class Own(BoringModel):\n"
        "    def __init__(self, lr: float = 0.5, max_steps: str = 'all', width: int = 3):\n"
        "        super().__init__()\n"
        "class Data(BoringDataModule):\n"
        "    def __init__(self, length: int = 5, batch_size: int = 6):\n"
        "        super().__init__()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    words = ["--model=lying_here.Own", "--data=lying_here.Data", "--data.length=7"]
    if in_a_file:
        (tmp_path / "a.yaml").write_text(
            "model: {class_path: lying_here.Own}\n"
            "data: {class_path: lying_here.Data, init_args: {length: 7}}\n"
        )
        words = ["--config=a.yaml"]
    monkeypatch.setattr(sys, "argv", ["lightning-par", "fit", *words, "--print_config"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"] == {
        "class_path": "lying_here.Own",
        "init_args": {"lr": 0.5, "max_steps": "all", "width": 3},
    }
    assert config["data"] == {
        "class_path": "lying_here.Data",
        "init_args": {"length": 7, "batch_size": 6},
    }
    run = configure(
        [*words, "--trainer.strategy=hybrid3d", "--trainer.accelerator=cpu"], on_meta=True
    )
    for key in ("model", "data"):
        assert run.config.fit[key].as_dict() == config[key]
    sys.modules.pop("lying_here")
