"""A damaged checkpoint, and a save that fails on one rank, are the same clear error on all."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.errors import CheckpointError
from tests.contract.test_checkpoints import fit, Rich
from tests.support.checkpoints import find_problems
from tests.support.ranks.api import ranks

pytestmark = pytest.mark.contract


@ranks(2, fresh=True)
def test_damaged_file_is_named_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "a")
    fit(world, "tp2", [saver], max_epochs=1, strategy={"checkpoint_format": "folder"})
    folder = tmp_path / "a.ckpt"
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        torch.distributed.barrier()
        if rank == 0:
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
        torch.distributed.barrier()
        says = rf"{path.name.replace('.', '[.]')} is damaged"
        with pytest.raises(CheckpointError, match=says):
            fit(world, "tp2", [], ckpt=folder)
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(data)
        torch.distributed.barrier()
    assert fit(world, "tp2", [], ckpt=folder).global_step == 6


class FullDisk(Callback):
    """From the second epoch on, one rank cannot write long files."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            trainer.strategy.finish_saving()
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))


@ranks(2, fresh=True)
@pytest.mark.parametrize(("background", "form"), [(False, "file"), (True, "folder")])
def test_full_disk_on_one_rank_keeps_the_previous_checkpoint_and_stops_all(
    rank: int, world: int, background: bool, form: str, tmp_path: Path
) -> None:
    """In the background the next save, here the end of the run, says so."""
    saver = ModelCheckpoint(tmp_path, "a", save_top_k=-1, enable_version_counter=False)
    options = {"async_save": background, "checkpoint_format": form}
    with pytest.raises(CheckpointError) as caught:
        fit(world, "dp2", [FullDisk(), saver], strategy=options)
    said = str(caught.value)
    assert "that was there before is unchanged. Remove the cause, and save again." in said
    assert "The cause is: rank 1: OSError: [Errno 27]" in said
    torch.distributed.barrier()
    assert find_problems(tmp_path / "a.ckpt") == []
    assert CheckpointReader(tmp_path / "a.ckpt").manifest.step == 3
    left = {p.name for p in tmp_path.iterdir()} - {".lightning_par-progress", "certificate.json"}
    assert left == {"a.ckpt"}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@ranks(2, fresh=True)
@pytest.mark.parametrize("form", ["file", "folder"])
def test_state_of_one_rank_that_cannot_be_stored_is_an_error_on_all(
    rank: int, world: int, form: str, tmp_path: Path
) -> None:
    """Only rank 0 stores the states of callbacks."""
    callbacks = [Rich(odd=lambda: 1), ModelCheckpoint(tmp_path, "a")]
    says = r"a\.ckpt was not saved\. The incomplete .*rank 0: .*odd is a function, which cannot be"
    with pytest.raises(CheckpointError, match=says):
        fit(world, "dp2", callbacks, strategy={"checkpoint_format": form})
    torch.distributed.barrier()
    assert {p.name for p in tmp_path.iterdir()} <= {".lightning_par-progress"}
