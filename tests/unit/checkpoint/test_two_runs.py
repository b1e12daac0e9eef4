"""Two runs that save to one path: the second one is refused, and no reader meets a torn file."""

import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.storage import partial_path, partials_of, write_object
from lightning_par.errors import CheckpointError
from tests.support.checkpoints import find_problems, holds, save_alone

HOLDS_A_CLAIM = """
import sys
from pathlib import Path
from lightning_par.checkpoint.claims import FolderClaims
from lightning_par.checkpoint.storage import partial_path
from tests.support.checkpoints import save_alone
path = Path(sys.argv[1])
assert FolderClaims().add(path.parent)
if sys.argv[2] == "writes":
    partial_path(path).touch()
else:
    save_alone(path, 1, as_file=sys.argv[3] == "file")
print("has it", flush=True)
sys.stdin.read()
"""

SAVES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from lightning_par.errors import CheckpointError
from tests.support.checkpoints import save_alone
for seed in itertools.count(1):
    try:
        save_alone(Path(sys.argv[1]), seed, as_file=sys.argv[2] == "file")
    except CheckpointError:
        pass
    print("saved", flush=True)
"""


def start(script: str, *arguments: object) -> "Popen[bytes]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return Popen(command, stdin=PIPE, stdout=PIPE)


def end(process: "Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("first", ["has saved", "writes"])
def test_second_run_is_refused_at_its_first_save(first: str, form: str, tmp_path: Path) -> None:
    path, as_file = tmp_path / "last.ckpt", form == "file"
    process = start(HOLDS_A_CLAIM, path, first, form)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"has it\n"
        with pytest.raises(CheckpointError, match=r"another run saves to this path.*LP508"):
            save_alone(path, 2, as_file=as_file)
        save_alone(tmp_path / "own.ckpt", 3, as_file=as_file)  # its own name
    finally:
        end(process)
    assert len(partials_of(path)) == (first == "writes"), "what the first run writes is its own"
    assert first == "writes" or holds(path, 1)
    save_alone(path, 2, as_file=as_file)  # the run that was killed is no matter of the next one
    assert holds(path, 2)
    assert names(tmp_path) == ["last.ckpt", "own.ckpt"]


@pytest.mark.parametrize("form", ["file", "folder"])
def test_no_reader_meets_a_torn_checkpoint_of_two_runs(form: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    processes = [start(SAVES_FOR_EVER, path, form) for _ in range(2)]
    try:
        for _ in range(20):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"saved\n"
            # A folder may be replaced between two of its files.
            assert form == "folder" or find_problems(path) == []
    finally:
        for process in processes:
            end(process)
    assert find_problems(path) == []
    save_alone(path, 7, as_file=form == "file")
    assert names(tmp_path) == ["last.ckpt"]


def test_a_reader_keeps_the_file_that_it_has_opened(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_alone(path, 1, as_file=True)
    reader = CheckpointReader(path)
    save_alone(path, 2, as_file=True)
    assert reader.problems(reader.manifest.files) == []
    assert holds(path, 2)


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("length", [246, 247, 255])
def test_a_name_of_any_length_is_saved(length: int, form: str, tmp_path: Path) -> None:
    path = tmp_path / ("x" * (length - 5) + ".ckpt")
    for seed in (1, 2):
        save_alone(path, seed, as_file=form == "file")
        assert holds(path, seed)
    write_object(path, 1)
    path = path.with_name("é" * (length // 2))
    save_alone(path, 3, as_file=form == "file")
    assert len(names(tmp_path)) == 2


def test_a_name_that_no_file_can_have_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was not saved, nothing is left: .*too long"):
        save_alone(tmp_path / ("x" * 256), 1, as_file=True)


def test_left_overs_of_one_name_are_not_those_of_another(tmp_path: Path) -> None:
    mine, other = tmp_path / "a.ckpt", tmp_path / "a.ckpt.b"
    for path in (mine, other):
        partial_path(path).touch()
    (tmp_path / ".a.ckpt.partial").touch()  # of an earlier version
    assert len(partials_of(mine)) == 2
    assert len(partials_of(other)) == 1
    write_object(mine, 1)
    assert not partials_of(mine)
    assert partials_of(other)
