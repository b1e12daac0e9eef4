"""A function in a fork: its result or error comes back, and nothing else of what it does."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_par.errors import PlanError
from lightning_par.inference.forked import ForkError, run_forked


def test_nothing_that_it_changes_or_writes_is_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, seed = {"number": [1]}, torch.initial_seed()
    by_name = tmp_path / "by_name"
    with (tmp_path / "already_open").open("w") as file:

        def work() -> list[int]:
            kept["number"].append(2)
            torch.manual_seed(seed + 1)
            sys.stdout.write("printed")
            os.write(2, b"printed")
            file.write("written")
            file.flush()
            by_name.write_text("written")
            return kept["number"]

        assert run_forked(work) == [1, 2]
    assert kept == {"number": [1]}
    assert torch.initial_seed() == seed
    assert not by_name.exists()
    assert not (tmp_path / "already_open").read_text()
    assert capfd.readouterr() == ("", "")


def test_files_stay_as_they_are_by_whatever_way_they_are_written(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    kept.write_text("old")

    def work() -> str:
        descriptor = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, b"new")
        os.close(descriptor)
        torch.save([1], other)
        with tempfile.NamedTemporaryFile("w", dir=tmp_path, delete=False) as file:
            file.write("new")
        Path(file.name).replace(kept)
        with tempfile.NamedTemporaryFile("w", dir=tmp_path) as file:
            file.write("new")
        kept.rename(other)
        kept.unlink()
        return kept.read_text()

    assert run_forked(work) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "old"


def test_its_error_is_raised() -> None:
    def refuse() -> None:
        raise PlanError("LP201", "no plan")

    with pytest.raises(PlanError, match="no plan"):
        run_forked(refuse)

    def fail() -> None:
        raise type("OfThisTest", (Exception,), {})("cannot be pickled")

    with pytest.raises(RuntimeError, match="OfThisTest: cannot be pickled"):
        run_forked(fail)


def test_a_fork_that_ends_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForkError, match="ended without a result"):
        run_forked(lambda: os._exit(3))
    monkeypatch.setattr("lightning_par.inference.forked._LIMIT", 0.1)
    with pytest.raises(ForkError, match="took more than"):
        run_forked(lambda: os.read(os.pipe()[0], 1))


def test_gradients_are_computed_there() -> None:
    weight = torch.ones(3, requires_grad=True)

    def work() -> list[float]:
        weight.square().sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_forked(work) == [2, 2, 2]
    assert weight.grad is None
