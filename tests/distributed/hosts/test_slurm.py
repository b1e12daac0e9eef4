"""A job of SLURM, of real daemons on two hosts, trains, and goes on when it is requeued."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.faults import restarts
from tests.support.faults.restarts import LOST, read_losses, SAVE_EVERY, undisturbed_losses
from tests.support.hosts import open_hosts
from tests.support.slurm import Slurm

STEPS = 3 * SAVE_EVERY
TOLERANCE = 1e-10
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(slurm.refusal() is not None, reason=slurm.refusal() or ""),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with open_hosts(2, tmp_path) as hosts:
        yield Slurm(hosts, tmp_path / "slurm")


def submit(cluster: Slurm, out: Path, *options: str, groups: str = "") -> int:
    out.mkdir(exist_ok=True)
    log = ["--output", f"{out}/log", "--open-mode=append", "--requeue", "--ntasks-per-node=1"]
    words = f"{sys.executable} {restarts.__file__} {out} {STEPS}"
    return cluster.submit([*log, *options], f"srun {groups} {words}")


def test_requeued_job_goes_on_from_its_last_checkpoint(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    wanted, out = undisturbed_losses(tmp_path / "one", STEPS), tmp_path / "out"
    job, deadline = submit(cluster, out, "--nodes=2"), time.monotonic() + 240
    while max([0, *(step for step, _ in read_losses(out))]) <= SAVE_EVERY:
        assert time.monotonic() < deadline, cluster.texts()
        time.sleep(0.05)
    cluster.ask("scontrol", "requeue", job)
    assert cluster.wait(job) == "COMPLETED", (out / "log").read_text()
    losses, said = read_losses(out), (out / "log").read_text()
    assert {step for step, _ in losses} == set(wanted)
    for step, loss in losses:
        assert loss == pytest.approx(wanted[step], rel=0, abs=TOLERANCE), step
    start, done, lost = map(int, LOST.findall(said)[0])
    assert start % SAVE_EVERY == 0
    assert len(losses) - STEPS == lost == done - start > 0


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
    text = "3 processes were started, but num_nodes=2 times devices=1 are 2."
    assert (uneven / "log").read_text().count(text) == 3
