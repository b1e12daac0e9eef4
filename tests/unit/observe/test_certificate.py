"""`certificate.json`: what is hashed, read, refused and compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_par.commands.certificate import certificate
from lightning_par.errors import ConfigurationError
from lightning_par.observe.certificate import (
    CERTIFICATE,
    Certificate,
    differences,
    read_certificate,
)
from lightning_par.observe.weights_hash import WeightsHash


def _weights(values: dict[str, torch.Tensor]) -> dict[str, object]:
    found = WeightsHash()
    for name, value in values.items():
        found.add(name, value)
    return found.result()


MADE = Certificate(
    versions={"torch": "2"},
    layout={"pp": 1, "tp": 2},
    options={"zero_stage": 1, "plan": None},
    seed=3,
    precision="64-true",
    steps=4,
    data={"epoch": 0, "batch": 4},
    proofs={"training step 0": "equal"},
    decisions=[{"name": "loss", "value": "the mean over the samples", "source": ""}],
    weights=_weights({"w": torch.tensor([3.0, 4.0])}),
)


def _store(folder: Path, made: Certificate = MADE) -> str:
    folder.mkdir(exist_ok=True)
    (folder / CERTIFICATE).write_text(made.to_json())
    return str(folder)


def test_the_hash_is_of_names_dtypes_shapes_and_values_alone() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    found = _weights({"w": value})
    assert found["norm"] == pytest.approx(float(value.norm()))
    assert found["parameters"] == 6
    assert _weights({"w": value.t().contiguous().t()}) == found  # another layout in memory
    others = {"v": value}, {"w": value.double()}, {"w": value.reshape(3, 2)}, {"w": value + 1}
    assert found["sha256"] not in {_weights(other)["sha256"] for other in others}
    small = _weights({"s": torch.tensor(2.0, dtype=torch.bfloat16), "e": torch.empty(0)})
    assert (small["parameters"], small["norm"]) == (1, 2.0)
    assert _weights({"w": torch.tensor([float("nan")])})["norm"] == "nan"


def test_a_certificate_is_read_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _store(tmp_path / "run")
    assert read_certificate(Path(folder)) == MADE == read_certificate(Path(folder) / CERTIFICATE)
    assert certificate(folder) == 0
    said = capsys.readouterr().out
    for text in ("layout: tp 2", "training step 0: equal", "loss: the mean", "sha256", "checked:"):
        assert text in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 5}, "was changed after the run wrote it"),
        ({"proofs": None}, "it has no valid proofs"),
        ({"format": 2}, "its format is not 1"),
    ],
)
def test_a_changed_certificate_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = Path(_store(tmp_path / "run")) / CERTIFICATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigurationError, match=said):
        certificate(str(path))


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / CERTIFICATE).write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        certificate(str(tmp_path))


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = _weights({"w": torch.tensor([3.0, 4.0001])})
    other = replace(MADE, layout={"pp": 2, "tp": 1}, weights=near, decisions=[])
    one, two = _store(tmp_path / "a"), _store(tmp_path / "b", other)
    assert certificate(one, two) == 0
    said = capsys.readouterr().out
    assert "equal: versions, options, seed, precision, steps, data, proofs\n" in said
    assert "differs: layout: pp 1 and 2; tp 2 and 1\n" in said
    assert "differs: decisions: loss: the mean over the samples and none\n" in said
    assert "their norms 5 and 5.00008011 have a relative difference of 1.6e-05" in said
    assert certificate(one, _store(tmp_path / "c", replace(MADE, steps=5))) == 1
    assert "differs: steps: 4 and 5\nnot the same run" in capsys.readouterr().out


def test_weights_without_a_hash_are_not_compared() -> None:
    found = differences(MADE, replace(MADE, weights={"note": "no hash: too large"}))
    assert found[1] == ["weights: not compared: no hash: too large"]
