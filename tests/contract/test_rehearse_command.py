"""``lightning-par rehearse`` on a file of configs/: what it prints, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from lightning_par.cli import main

CONFIG = Path(__file__).resolve().parents[2] / "configs/gpt_hybrid3d_4.yaml"

pytestmark = pytest.mark.contract


@pytest.fixture
def call(monkeypatch):
    def run(*arguments):
        line = ["lightning-par", "rehearse", f"--config={CONFIG}", *arguments]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run


def test_every_kind_of_rank_is_described(call, capfd):
    assert call("--all-distinct") == 0
    said = capfd.readouterr().out
    heads = [line for line in said.splitlines() if line.startswith("rank ")]
    assert [head.partition(":")[0] for head in heads] == [
        "rank 0 (pp 0, tp 0)", "rank 2 (pp 1, tp 0)", "rank 3 (pp 1, tp 1)",
    ]  # fmt: skip
    for word in ("optimizer state", "all_gather", "pp activations", "collectives in order", "MiB"):
        assert said.count(word) >= 3


@pytest.mark.parametrize("more", [(), ("--trainer.strategy=hybrid3d", "--devices=1")], ids=len)
def test_the_first_configuration_is_rehearsed_as_it_stands(more, call, capfd):
    """With a callback that counts operations, and a loss that each step confirms."""
    assert call(f"--config={CONFIG.with_name('gpt.yaml')}", *more) == 0
    assert "rehearsed in" in capfd.readouterr().out


def test_machines_get_every_number_and_every_call(call, capfd):
    assert call("--rank=3", "--json") == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["peak"] == sum(found["memory"].values())
    calls = sum(entry["calls"] for entry in found["volume"])
    assert calls == sum(row["calls"] for row in found["collectives"]) > 50


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank=4"], "rank=4 does not exist: num_nodes=1 times devices=4 have the ranks 0 to 3"),
        (["--devices=6"], "needs 4 devices or a multiple, but the Trainer has 6"),
        (["--model.init_args.overrides.num_layers=1"], "model.blocks has 1 blocks"),
        (["--model.init_args.overrides.num_heads=3"], "num_heads=3 does not divide model_dim=64"),
        (["--config=nowhere.yaml"], "nowhere.yaml names a file that does not exist"),
    ],
    ids=["rank", "devices", "a stage without blocks", "a model's own error", "no file"],
)
def test_what_is_wrong_is_said_in_a_line_and_without_a_traceback(arguments, said, call, capfd):
    assert call(*arguments) == 1
    heard = capfd.readouterr().err
    assert "lightning-par: error: " in heard
    assert said in heard
    assert "Traceback" not in heard
