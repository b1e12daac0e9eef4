"""Checkpoints in a folder that the hosts do not share are refused, and nobody waits for anybody."""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.host_runs import start_ranks
from tests.support.hosts import open_hosts
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

WRITES = "host host1 does not see files that rank 0 on host host0 writes to {}, the folder"
READS = (
    "host host1 does not see {}, but other hosts do. Use a folder on a file system that all hosts"
)


def try_all(out: Path) -> None:
    """Save and load in a folder that is another one on the second host."""
    from lightning_par import Hybrid3DStrategy
    from lightning_par.errors import CheckpointError

    own = out / "own"

    def attempt(what: str, saving: list[Any], **fit: Any) -> Any:
        strategy = Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=2)
        saves = {"enable_checkpointing": bool(saving), "callbacks": saving}
        trainer = quiet_trainer(devices=1, num_nodes=2, strategy=strategy, max_steps=1, **saves)
        try:
            trainer.fit(ToyModule(), loader(ToyData(8), 4), **fit)
            if what == "save":
                trainer.save_checkpoint(own / "new" / "one.ckpt")
        except CheckpointError as error:
            sys.stderr.write(f"{what}: {error}\n")
        return trainer

    attempt("start", [ModelCheckpoint(own / "run")])
    attempt("save", [])
    shared = attempt("shared", [ModelCheckpoint(out / "shared", save_last=True)])
    if shared.is_global_zero:
        (out / "shared" / "last.ckpt").rename(own / "last.ckpt")
    shared.strategy.barrier()
    attempt("load", [], ckpt_path=own / "last.ckpt")


def test_folder_that_hosts_do_not_share_is_refused_at_start_save_and_load(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with open_hosts(2, tmp_path) as hosts:
        hosts[1].hide(own)
        start_ranks(hosts, 1, try_all, tmp_path)
        assert hosts.wait(150) == [0, 0], hosts.texts()
        for host in hosts:
            said = host.tasks[0].text()
            assert f"start: {WRITES.format(own / 'run')}" in said, said
            assert f"save: {WRITES.format(own / 'new')}" in said, said
            assert "shared: " not in said
            assert f"load: {READS.format(own / 'last.ckpt')}" in said, said
            assert host.left() == []
        assert [path.name for path in own.iterdir()] == ["last.ckpt"]  # no mark is left
