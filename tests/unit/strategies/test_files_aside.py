"""What the user's code writes while it runs without a trace: nothing is written or removed."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_par.strategies.start.files_aside import files_aside


def replaces(path: Path) -> None:
    """As savers do it: a temporary file beside, then renamed."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write("new")
    Path(file.name).replace(path)


def moves_on(path: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    os.close(descriptor)
    Path(name).write_text("new")
    Path(name).rename(path)


def writes_by_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, b"new")
    os.close(descriptor)


def removes(path: Path) -> None:
    path.unlink()


def appends(path: Path) -> None:
    with path.open("a") as file:
        file.write("new")
    assert path.read_text().endswith("new")


WAYS: list[Callable[[Path], Any]] = [
    replaces,
    moves_on,
    writes_by_descriptor,
    removes,
    appends,
    lambda path: torch.save({"new": 1}, path),
    lambda path: torch.save({"new": 1}, str(path)),
    lambda path: TorchCheckpointIO().save_checkpoint({"new": 1}, path),
    lambda path: np.save(path.with_suffix(".npy"), np.ones(3)),
    lambda path: (path.with_suffix(".tmp").write_text("new"), path.with_suffix(".tmp").unlink()),
    lambda path: path.with_suffix(".link").symlink_to(path),
    lambda path: path.touch(),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exists", [True, False])
def test_files_stay_as_they_were(way: Any, exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if exists:
        path.write_text("old")
    elif way is removes:
        pytest.skip("there is nothing to remove")
    with files_aside() as copies:
        way(path)
        folders = {copy.parent.parent for copy in copies.values()}
    assert [file.name for file in tmp_path.iterdir()] == (["file"] if exists else [])
    assert not exists or path.read_text() == "old"
    assert not any(folder.exists() for folder in folders)
    path.write_text("written")  # as ever, afterwards
    assert path.read_text() == "written"


def test_a_step_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files_aside():
        replaces(path)
        assert path.read_text() == "new"
        descriptor = os.open(path, os.O_RDONLY)
        assert os.read(descriptor, 9) == b"new"
        os.close(descriptor)
        torch.save([3], tmp_path / "saved")
        assert torch.load(tmp_path / "saved") == [3]
        with pytest.raises(FileNotFoundError):
            (tmp_path / "none").rename(path)


def test_other_threads_write_on(tmp_path: Path) -> None:
    """As one that saves a checkpoint in the background."""
    path = tmp_path / "file"
    with files_aside() as copies:
        thread = threading.Thread(target=replaces, args=(path,))
        thread.start()
        thread.join()
        assert not copies
    assert path.read_text() == "new"
