"""What every command says of its options, and of a mistake in them."""

import re
import sys
from pathlib import Path

import pytest

from lightning_par.cli import main
from lightning_par.commands import COMMANDS, find_command, find_parser
from lightning_par.engine.pipeline.schedules import SCHEDULES

CONFIG = str(Path(__file__).parents[3] / "configs" / "gpt_hybrid3d_4.yaml")
OPTIONS = {
    "backends": "",
    "calibrate": "--out --name --accelerator --devices --nodes --seconds --dtype",
    "certificate": "",
    "completion": "",
    "explain": "",
    "export": "--ckpt --out --format --max-shard-gb --below --trust",
    "fit_islands": "--islands --restarts --state",
    "forecast": "--config --device --profile --nodes --devices --length --samples --picture --json",
    "inspect": "--tensors --no-verify",
    "memory": "--config --devices --device-gib --host-gib",
    "plan": "--all",
    "rehearse": "--config --nodes --devices --rank --all-distinct --json",
    "schedule": "--schedule --stages --microbatches --virtual --forward --backward-input "
    "--backward-weight --p2p --out",
    "search": "--config --device --profile --nodes --devices --length --samples --picture --json "
    "--offload --keep --try --try-seconds --out",
    "serve": "--host --port --state --key-file --certificate --certificate-key",
    "tokenize": "--out --tokenizer --key --end",
    "verify": "--steps --timeout",
    "why": "--steps",
}
"""The spelling of options, which scripts and pages of users contain."""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line; return its status, its output and the last line of its errors."""
    before, sys.argv = sys.argv, ["lightning-par", *words]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err.strip().rpartition("\n")[2]


def test_options_are_spelled_as_ever():
    found = {}
    for name in OPTIONS:
        flags = [flag for a in find_parser(name)._actions for flag in a.option_strings]
        found[name] = " ".join(flag for flag in flags if flag not in ("-h", "--help"))
    assert found == OPTIONS
    assert found.keys() == COMMANDS.keys() | {"fit_islands"}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_help_explains_every_option(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        find_command(name)(["--help"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "``" not in said
    for action in find_parser(name)._actions:
        assert action.help
        assert action.help[-1] != "."
    more = "All other arguments are those of lightning-par fit" in said
    assert more == (
        name in ("fit_islands", "forecast", "memory", "plan", "rehearse", "search", "verify")
    )


def test_help_names_defaults_schedules_and_other_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "100")  # lines are as wide as the terminal
    _, said, _ = call(capsys, "schedule", "--help")
    for text in (*SCHEDULES, "(default: 1f1b)", "(default: 8)", "(default: 1)", "(default: 0)"):
        assert text in said
    assert "{auto,float32,bfloat16,float16}" in call(capsys, "calibrate", "--help")[1]
    assert re.search(
        r"--islands N +Number of islands", call(capsys, "fit", "--islands", "--help")[1]
    )


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("schedule --stages x", 2, "schedule: error: argument --stages: invalid int value: 'x'"),
        ("schedule --nonsense 3", 2, "schedule: error: unrecognized arguments: --nonsense 3"),
        ("schedule --micro 0", 1, "num_microbatches=0 must be 1 or more"),
        ("inspect", 2, "inspect: error: the following arguments are required: CHECKPOINT"),
        ("inspect a b", 2, "inspect: error: unrecognized arguments: b"),
        ("export --ckpt a", 2, "export: error: the following arguments are required: --out"),
        ("completion fish", 2, "completion: error: argument shell: invalid choice: 'fish'"),
        ("certificate", 2, "certificate: error: the following arguments are required: RUN"),
        ("why tests", 1, "error: there is no file post_mortem.rank*.json in 'tests'. A rank"),
        ("certificate none", 1, "error: the file none does not exist. A fit that ends"),
        ("explain lp999", 1, "error: LP999 is no error code of lightning_par; did you mean"),
        (
            "calibrate --out none/x.json",
            1,
            "error: --out none/x.json cannot be written, since the folder none does not exist.",
        ),
        ("fit --islands=two", 2, "fit --islands: error: argument --islands: invalid int value"),
        ("search", 2, "search: error: the following arguments are required: --config"),
        (
            "forecast --config no.yaml",
            1,
            "error: --config no.yaml names a file that does not exist.",
        ),
        ("verify --steps 0", 1, "error: --steps 0 must be 1 or more."),
        (f"forecast --config {CONFIG} --device h1000", 1, "h1000"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    found, out, error = call(capsys, *words.split())
    assert (found, out) == (status, "")
    assert error.startswith("lightning-par")
    assert said in error


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("name", ["forecast", "memory", "plan", "rehearse", "search", "verify"])
def test_a_mistake_in_what_fit_takes_is_as_short(name: str, capsys: pytest.CaptureFixture[str]):
    *_, error = call(capsys, "fit", "--config", CONFIG, "--trainer.nonsense=3")
    assert error == "lightning-par fit --help lists every option."
    status, out, said = call(capsys, name, "--config", CONFIG, "--trainer.nonsense=3")
    assert out == ""
    if name == "rehearse":  # whose processes have told the mistake
        assert (status, "the error that is printed above" in said) == (1, True)
    else:
        assert (status, said) == (2, error)
