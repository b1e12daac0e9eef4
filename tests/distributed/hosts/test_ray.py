"""Ray Train starts workers on two hosts, which train, save, and go on in another run."""

import sys
import time
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import pytest

from lightning_par.checkpoint.reader import CheckpointReader
from tests.support.hosts import Hosts, open_hosts, Task

TRAIN = Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ray" / "train.py"
SECONDS = 400.0


def start_cluster(hosts: Hosts, variables: dict[str, str]) -> str:
    """Start Ray on every host; give the address of the first one."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
    start += ["--object-store-memory=100000000", "--disable-usage-stats"]
    address = f"{hosts[0].address()}:6379"
    for host in hosts:
        place = ["--head", "--port=6379"] if host is hosts[0] else [f"--address={address}"]
        host.run([*start, *place, f"--node-ip-address={host.address()}"], **variables)
    return address


def finish(run: Task, hosts: Hosts) -> None:
    deadline = time.monotonic() + SECONDS
    while run.code is None:
        assert time.monotonic() < deadline, hosts.texts()
        time.sleep(0.2)
    assert run.code == 0, hosts.texts()


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_ray_trains_on_two_hosts_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray Train needs ray[train]")
    folder = tmp_path / "run"
    # Names of sockets have 107 bytes at most, which the folder of a test uses up.
    with TemporaryDirectory(prefix="ray-") as short, open_hosts(2, tmp_path) as hosts:
        variables = {"TMPDIR": short, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
        # Ray makes the process group by itself, before our code can name the interface.
        variables["GLOO_SOCKET_IFNAME"] = "eth0"
        address = start_cluster(hosts, variables)
        for steps in (10, 20):
            words = [sys.executable, TRAIN, 4, folder, steps]
            run = hosts[0].run(words, RAY_ADDRESS=address, **variables)
            finish(run, hosts)
            assert CheckpointReader(folder / "last.ckpt").manifest.step == steps
        assert f"Restoring states from the checkpoint path at {folder}/last.ckpt" in run.text()
        said = run.text()
        assert all(f"ip={host.address()}" in said for host in hosts)
