"""The machine is measured and written as a profile that predictions take."""

import json
from pathlib import Path

import pytest

from lightning_par.checkpoint.progress import showing
from lightning_par.commands import find_command
from lightning_par.errors import ConfigurationError
from lightning_par.planner.profiles import load_profile, reached
from lightning_par.profiling.rounds import fit_positive
from tests.support.progress import Kept

main = find_command("calibrate")
QUICK = ["--accelerator=cpu", "--seconds=0.0005"]


def test_a_profile_is_written_beside_those_of_other_machines(tmp_path: Path, capsys) -> None:
    path, kept = tmp_path / "mine.json", Kept(tmp_path / "kept")
    with showing(kept):
        assert main([f"--out={path}", "--name=first", *QUICK]) == 0
    ((name, unit, done, total),) = kept.works()
    assert (name, unit) == ("measuring", "measurements")
    assert done == total
    first = json.loads(path.read_text())["devices"]["first"]
    assert main([f"--out={path}", "--name=second", *QUICK]) == 0
    said = capsys.readouterr().out
    assert f"--profile {path} --device second" in said
    assert json.loads(path.read_text())["devices"]["first"] == first
    device = load_profile("second", path)
    assert [load_profile(name, path).accelerator for name in ("second", "h100")] == ["cpu", "gpu"]
    assert device.calibration is not None
    assert reached(device) == device.calibration.constants
    assert device.calibration.slowdown == (1.0,)


@pytest.mark.parametrize("content", ["[]", "{", '{"devices": 3}'])
def test_a_file_with_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="is no file of device profiles"):
        main([f"--out={path}", *QUICK])
    assert path.read_text() == content


def test_a_missing_folder_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the folder .* does not exist"):
        main([f"--out={tmp_path / 'none' / 'mine.json'}", *QUICK])


def test_factors_are_found_again_and_never_negative() -> None:
    rows = [[1e9, 1e6, 1.0], [4e9, 1e6, 1.0], [8e9, 8e6, 1.0], [1e6, 1e3, 1.0]]
    times = [a * 2e-12 + b * 3e-11 + 5e-6 for a, b, _ in rows]
    assert fit_positive(rows, times) == pytest.approx([2e-12, 3e-11, 5e-6], rel=1e-6)
    # The constant part is negative here: it counts for nothing.
    small = fit_positive([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]], [0.5, 1.6, 3.7])
    assert small[0] == pytest.approx(0.75, rel=0.2)
    assert 0 < small[1] < 1e-9
