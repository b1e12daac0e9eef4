"""A process that is killed while it saves leaves the last complete checkpoint."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint.reader import find_problems
from tests.support.checkpoints import holds, save_alone
from tests.support.ranks.api import RankError, ranks, run_ranks
from tests.support.resharding import differences, go_on, LAYOUTS, run_layout, world_of

FILE_EVENTS = ("open", "os.", "shutil.", "ctypes.")


class Deadline:
    """Ends this process with SIGKILL at the n-th operation on files; counts them if n is 0."""

    def __init__(self, number: int) -> None:
        self.left, self.count, self.active = number, 0, True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: Any) -> None:
        if self.active and event.startswith(FILE_EVENTS):
            self.count += 1
            if self.count == self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def in_fork(path: Path, number: int, seed: int) -> bool:
    """Save in a process that dies at an operation; return whether it died."""
    pid = os.fork()
    if pid == 0:
        Deadline(number)
        save_alone(path, seed)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@ranks(1, fresh=True)
def test_killed_at_every_operation_the_old_or_the_new_one_is_whole(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    save_alone(path, 1)
    number, seed, outcomes = 1, 1, []
    while in_fork(path, number, seed + 1):
        assert find_problems(path) == []
        new = holds(path, seed + 1)
        assert new or holds(path, seed)
        outcomes.append(new)
        number, seed = number + 1, seed + new
    assert holds(path, seed + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]  # what was left is cleared away
    assert outcomes.count(False) >= 20
    assert outcomes.count(True) >= 5


def die_while_saving(rank: int, world: int, layout: str, folder: Path, seed: int) -> None:
    """Save at step 1, and die on one rank somewhere in the save of step 2, to the same name."""
    import lightning_par.checkpoint.save_coordinator as saver

    path = folder / "a.ckpt"
    go_on(rank, world, layout, folder, steps=1, save_at=1, save_to=path)
    generator = random.Random(seed)
    victim = generator.randrange(world)
    number = generator.randrange(1, 12 if victim == 0 else 5)  # rank 0 has more to do
    original = saver.write_part
    if rank == victim:

        def deadly(*arguments: Any) -> Any:
            Deadline(number)
            return original(*arguments)

        saver.write_part = deadly
    try:
        go_on(rank, world, layout, folder, steps=2, save_at=2, save_to=path, source=path)
    except BaseException as error:
        (folder / f"said-{rank}").write_text(str(error))
        raise
    finally:
        saver.write_part = original
    raise RuntimeError("the save was over before the kill")


def check_kill(layout: str, folder: Path, seed: int) -> None:
    wanted = run_layout(layout, folder, steps=1, save_at=1)[0]["saved"]
    world = world_of(layout)
    with pytest.raises(RankError) as caught:
        run_ranks(die_while_saving, world, layout, folder, seed, fresh=True, timeout=90)
    assert caught.value.kind == "died", caught.value
    (said,) = [file.read_text() for file in folder.glob("said-*")]
    assert "was not saved, because a rank did not take part" in said
    path = folder / "a.ckpt"
    assert find_problems(path) == []
    resumed = run_layout(layout, folder, steps=3, source=path)
    if resumed[0]["loaded"]["step"] == 1:
        assert differences(resumed[0]["loaded"], wanted) == []
    else:  # it died when the new one was in place
        assert resumed[0]["loaded"]["step"] == 2
    assert torch.isfinite(torch.tensor(resumed[0]["losses"])).all()


SEEDS = 50
DEFAULT_SEEDS = (0, 1)


@pytest.mark.parametrize(
    "seed",
    [
        *DEFAULT_SEEDS,
        *(
            pytest.param(seed, marks=pytest.mark.exhaustive)
            for seed in range(SEEDS)
            if seed not in DEFAULT_SEEDS
        ),
    ],
)
def test_killed_rank_leaves_the_last_complete_checkpoint(seed: int, tmp_path: Path) -> None:
    names = [name for name in LAYOUTS if world_of(name) == 2]
    check_kill(names[seed % len(names)], tmp_path, seed)
