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

CASES = [(first, form) for first in ("has saved", "writes") for form in ("file", "folder")]
"""What the first run has done, and the form of the checkpoint."""

HOLDS_CLAIMS = """
import sys
from pathlib import Path
from lightning_par.checkpoint.claims import FolderClaims
from lightning_par.checkpoint.storage import partial_path
from tests.support.checkpoints import save_alone
from tests.unit.checkpoint.test_two_runs import CASES, place
for case in CASES:
    path = place(Path(sys.argv[1]), *case)
    path.parent.mkdir()
    assert FolderClaims().add(path.parent)
    if case[0] == "writes":
        partial_path(path).touch()
    else:
        save_alone(path, 1, as_file=case[1] == "file")
print("has them", flush=True)
sys.stdin.read()
"""

SAVES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from lightning_par.errors import CheckpointError
from tests.support.checkpoints import save_alone
for seed in itertools.count(1):
    for form in ("file", "folder"):
        try:
            save_alone(Path(sys.argv[1], form, "last.ckpt"), seed, as_file=form == "file")
        except CheckpointError:
            pass
    print("saved", flush=True)
"""


def place(folder: Path, first: str, form: str) -> Path:
    """The checkpoint of a case, in a folder of its own."""
    return folder / f"{form} {first}" / "last.ckpt"


def start(script: str, *arguments: object) -> "Popen[bytes]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return Popen(command, stdin=PIPE, stdout=PIPE)


def end(process: "Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_second_run_is_refused_at_its_first_save(tmp_path: Path) -> None:
    """By one process that holds the checkpoints of all cases."""
    process = start(HOLDS_CLAIMS, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"has them\n"
        for case in CASES:
            path, as_file = place(tmp_path, *case), case[1] == "file"
            with pytest.raises(CheckpointError, match=r"another run saves to the same path.*LP508"):
                save_alone(path, 2, as_file=as_file)
            save_alone(path.with_name("own.ckpt"), 3, as_file=as_file)  # its own name
    finally:
        end(process)
    for first, form in CASES:
        path = place(tmp_path, first, form)
        assert len(partials_of(path)) == (first == "writes"), "what the first run writes is its own"
        assert first == "writes" or holds(path, 1)
        # The run that was killed is no matter of the next one.
        save_alone(path, 2, as_file=form == "file")
        assert holds(path, 2)
        assert names(path.parent) == ["last.ckpt", "own.ckpt"]


def test_no_reader_meets_a_torn_checkpoint_of_two_runs(tmp_path: Path) -> None:
    file, folder = (tmp_path / form / "last.ckpt" for form in ("file", "folder"))
    for path in (file, folder):
        path.parent.mkdir()
    processes = [start(SAVES_FOR_EVER, tmp_path) for _ in range(2)]
    try:
        for _ in range(20):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"saved\n"
            assert find_problems(file) == []  # a folder may be replaced between two of its files
    finally:
        for process in processes:
            end(process)
    for path in (file, folder):
        assert find_problems(path) == []
        save_alone(path, 7, as_file=path == file)
        assert names(path.parent) == ["last.ckpt"]


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
    with pytest.raises(
        CheckpointError, match=r"was not saved\. The incomplete files were removed\..*too long"
    ):
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
