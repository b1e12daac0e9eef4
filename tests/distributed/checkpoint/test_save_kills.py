"""A process that is killed while it saves leaves the last complete checkpoint."""

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint.storage import remove_path
from lightning_par.checkpoint.writer import Save
from tests.support.checkpoints import find_problems, holds, save_alone
from tests.support.ranks.api import RankError, ranks, run_ranks
from tests.support.resharding import differences, go_on, LAYOUTS, run_layout, world_of

FILE_EVENTS = ("open", "os.", "shutil.", "ctypes.")


class Deadline:
    """Ends this process with SIGKILL at the n-th operation on files, or write into one file."""

    def __init__(self, number: int) -> None:
        self.left, self.count = number, 0
        sys.addaudithook(self._hook)
        self._write, os.pwrite = os.pwrite, self._counted_write  # nobody audits writes

    def _hook(self, event: str, arguments: Any) -> None:
        if event.startswith(FILE_EVENTS):
            self._count_one()

    def _count_one(self) -> None:
        self.count += 1
        if self.count == self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted_write(self, *arguments: Any) -> int:
        self._count_one()
        return self._write(*arguments)


def in_fork(path: Path, number: int, seed: int, form: str) -> bool:
    """Save in a process that dies at an operation; return whether it died."""
    pid = os.fork()
    if pid == 0:
        Deadline(number)
        save_alone(path, seed, as_file=form == "file")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@ranks(1, fresh=True)
@pytest.mark.parametrize("form", ["file", "folder"])
def test_killed_at_every_operation_of_the_first_save_there_is_nothing_or_all(
    rank: int, world: int, form: str, tmp_path: Path
) -> None:
    path, number = tmp_path / "a.ckpt", 1
    while in_fork(path, number, 1, form):
        assert not path.exists() or (find_problems(path) == [] and holds(path, 1))
        remove_path(path)
        number += 1
    assert holds(path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]  # what was left is cleared away
    assert number >= 20


@ranks(1, fresh=True)
@pytest.mark.parametrize("form", ["file", "folder"])
def test_killed_at_every_operation_the_old_or_the_new_one_is_whole(
    rank: int, world: int, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    save_alone(path, 1, as_file=form == "file")
    number, seed, outcomes = 1, 1, []
    while in_fork(path, number, seed + 1, form):
        assert find_problems(path) == []
        new = holds(path, seed + 1)
        assert new or holds(path, seed)
        outcomes.append(new)
        number, seed = number + 1, seed + new
    assert holds(path, seed + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]  # what was left is cleared away
    assert outcomes.count(False) >= 20
    assert outcomes.count(True) >= (5 if form == "folder" else 1)


def die_while_saving(
    rank: int, world: int, layout: str, folder: Path, seed: int, form: str, name: str
) -> None:
    """Save at step 1, and die on one rank somewhere in the save of step 2, to some name."""
    path = folder / "last.ckpt"
    options = {"checkpoint_format": form}
    go_on(rank, world, layout, folder, steps=1, save_at=1, save_to=path, **options)
    generator = random.Random(seed)
    victim = generator.randrange(world)
    number = generator.randrange(1, 12 if victim == 0 else 5)  # rank 0 has more to do
    original = Save.write
    if rank == victim:

        def deadly(*arguments: Any) -> Any:
            Deadline(number)
            return original(*arguments)

        Save.write = deadly  # type: ignore[method-assign]
    try:
        end = {"save_at": 2, "save_to": folder / name, **options}
        go_on(rank, world, layout, folder, steps=2, source=path, **end)
    except BaseException as error:
        (folder / f"said-{rank}").write_text(str(error))
        raise
    finally:
        Save.write = original  # type: ignore[method-assign]
    raise RuntimeError("the save was over before the kill")


def check_kill(layout: str, folder: Path, seed: int, form: str, name: str) -> None:
    wanted = run_layout(layout, folder, steps=1, save_at=1)[0]["saved"]
    world, rest = world_of(layout), (layout, folder, seed, form, name)
    with pytest.raises(RankError) as caught:
        run_ranks(die_while_saving, world, *rest, fresh=True, timeout=90)
    assert caught.value.kind == "died", caught.value
    (said,) = [file.read_text() for file in folder.glob("said-*")]
    assert "was not saved, since some rank did not call save_checkpoint or failed" in said
    found = list(folder.glob("[!.]*.ckpt"))
    assert folder / "last.ckpt" in found
    for path in found:
        assert find_problems(path) == []
        resumed = run_layout(layout, folder, steps=3, source=path)
        step = resumed[0]["loaded"]["step"]
        if step == 1:
            assert differences(resumed[0]["loaded"], wanted) == []
        assert step == 1 or path.name == name  # it died when the new one was in place
        assert torch.isfinite(torch.tensor(resumed[0]["losses"])).all()


SEEDS = 50
NAMES = {"while saving": "next.ckpt", "while overwriting": "last.ckpt"}
DEFAULT = {("folder", "while overwriting", 0), ("file", "while overwriting", 1)}


@pytest.mark.parametrize(
    ("form", "when", "seed"),
    [
        pytest.param(*cell, marks=[] if cell in DEFAULT else [pytest.mark.exhaustive])
        for cell in itertools.product(("folder", "file"), NAMES, range(SEEDS))
    ],
)
def test_killed_rank_leaves_the_last_complete_checkpoint(
    form: str, when: str, seed: int, tmp_path: Path
) -> None:
    names = [name for name in LAYOUTS if world_of(name) == 2]
    check_kill(names[seed % len(names)], tmp_path, seed, form, NAMES[when])
