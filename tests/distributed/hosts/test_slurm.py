"""A job of SLURM, of real daemons on two hosts, trains, and goes on when it is requeued."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_par.checkpoint.index import Manifest
from tests.support import slurm
from tests.support.checkpoints import find_problems
from tests.support.faults import restarts
from tests.support.faults.restarts import LOST, read_losses, SAVE_EVERY, undisturbed_losses
from tests.support.hosts import open_hosts
from tests.support.slurm import Slurm

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "clusters" / "slurm" / "train.sbatch"
STEPS = 20 * SAVE_EVERY
TOLERANCE = 1e-10
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(slurm.refusal() is not None, reason=slurm.refusal() or ""),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with open_hosts(2, tmp_path) as hosts:
        yield Slurm(hosts, tmp_path / "slurm")


def submit(
    cluster: Slurm, out: Path, *options: str, groups: str = "", every: int = SAVE_EVERY
) -> int:
    out.mkdir(exist_ok=True)
    log = ["--output", f"{out}/log", "--open-mode=append", "--requeue", "--ntasks-per-node=1"]
    words = f"{sys.executable} {restarts.__file__} {out} {STEPS}"
    return cluster.submit([*log, *options], f"SAVE_EVERY={every} srun {groups} {words}")


# How a job is requeued, how often it saves before, and the checkpoint from which it goes on.
PREEMPTED = (["scontrol", "requeue"], SAVE_EVERY, "last.ckpt")
SIGNALED = (["scancel", "--signal=USR1"], 10 * STEPS, "last-requeue.ckpt")


@pytest.mark.parametrize(
    ("words", "every", "name"), [PREEMPTED, pytest.param(*SIGNALED, marks=pytest.mark.exhaustive)]
)
def test_requeued_job_goes_on_from_its_newest_checkpoint(
    words: list[str], every: int, name: str, cluster: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    wanted, out = undisturbed_losses(tmp_path / "one", STEPS), tmp_path / "out"
    job, deadline = submit(cluster, out, "--nodes=2", every=every), time.monotonic() + 240
    while max([0, *(step for step, _ in read_losses(out))]) <= SAVE_EVERY:
        assert time.monotonic() < deadline, cluster.texts()
        time.sleep(0.05)
    cluster.ask(*words, job)
    assert cluster.wait(job) == "COMPLETED", (out / "log").read_text()
    losses, said = read_losses(out), (out / "log").read_text()
    assert {step for step, _ in losses} == set(wanted)
    for step, loss in losses:
        assert loss == pytest.approx(wanted[step], rel=0, abs=TOLERANCE), step
    assert f"Restoring states from the checkpoint path at {out}/saved/{name}" in said
    start, done, lost = map(int, LOST.findall(said)[0])
    assert start % every == 0 or start > SAVE_EVERY
    assert len(losses) - STEPS == lost == done - start > 0


@pytest.mark.exhaustive
def test_batch_file_of_the_example_trains(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    options = ["--gpus-per-node=0", "--output", tmp_path / "log", "--chdir", EXAMPLE.parent]
    job = cluster.ask("sbatch", "--parsable", *options, EXAMPLE)
    assert cluster.wait(int(job)) == "COMPLETED", (tmp_path / "log").read_text()
    assert find_problems(tmp_path / "run" / "last.ckpt") == []
    assert Manifest.read(tmp_path / "run" / "last.ckpt").step == 100


@pytest.mark.exhaustive
def test_heterogeneous_job_trains_or_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    wanted, even, uneven = (
        undisturbed_losses(tmp_path / "one", STEPS),
        tmp_path / "2",
        tmp_path / "3",
    )
    other, groups = [":", "--nodes=1", "--ntasks-per-node=1"], "--het-group=0,1"
    job = submit(cluster, even, "--nodes=1", *other, groups=groups)
    assert cluster.wait(job) == "COMPLETED", (even / "log").read_text()
    assert dict(read_losses(even)) == pytest.approx(wanted, rel=0, abs=TOLERANCE)
    job = submit(cluster, uneven, "--nodes=1", "--ntasks-per-node=2", *other, groups=groups)
    assert cluster.wait(job) == "FAILED"
    text = (
        "3 processes were started, but the Trainer expects num_nodes=2 times devices=1, which is 2."
    )
    assert (uneven / "log").read_text().count(text) == 3
