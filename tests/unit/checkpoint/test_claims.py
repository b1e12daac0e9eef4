"""Two runs that save into one folder are told so, and nothing is left behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_par.checkpoint.claims import FolderClaims
from lightning_par.checkpoint.storage import partial_path
from tests.support.checkpoints import save_alone


def in_another_process(work: Callable[[], bool]) -> bool:
    """Run in a process that shares no lock with this one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_folder_is_claimed_by_one_process_at_a_time(tmp_path: Path) -> None:
    ready, done = os.pipe()
    holder = os.fork()
    if holder == 0:
        FolderClaims().add(tmp_path)
        os.write(done, b"x")
        os.close(done)
        while os.getppid() != 1:
            os.sched_yield()
        os._exit(0)
    os.read(ready, 1)
    try:
        assert not FolderClaims().add(tmp_path)
        (tmp_path / "below").mkdir()
        below = FolderClaims()
        assert below.add(tmp_path / "below")
        below.release()
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
    # The lock went with the process, killed as it was.
    mine, again = FolderClaims(), FolderClaims()
    assert mine.add(tmp_path)
    assert again.add(tmp_path)  # two runs in one process, one after the other
    mine.release()
    again.release()
    assert in_another_process(lambda: FolderClaims().add(tmp_path))


def test_second_run_is_told_at_its_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = FolderClaims()
    assert first.add(tmp_path)
    # A process that does not know of the claim of this one, as it was started on its own.
    import lightning_par.checkpoint.claims as claims

    held = dict(claims._held)
    claims._held.clear()
    try:
        save_alone(tmp_path / "a.ckpt", 1)
    finally:
        claims._held.update(held)
        first.release()
    assert f"Another run saves checkpoints into {tmp_path}, too" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_a_killed_save_leaves_is_no_checkpoint_of_slurm(tmp_path: Path) -> None:
    """Lightning takes the highest number in the names of a folder."""
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False)
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    for number in (1, 2):
        partial_path(tmp_path / f"hpc_ckpt_{number}.ckpt").touch()
    assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")
