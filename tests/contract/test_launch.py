"""Every way to start the processes of a run gives the same run, and leaves no process behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.exhaustive import some
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train_script.py")
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_", "NODE_", "MASTER_", "SLURM_", "TORCHELASTIC_", "GROUP_")
MARK = "LIGHTNING_PAR_TEST_RUN"
LIMIT = 160.0
pytestmark = pytest.mark.contract


def free_port() -> str:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(folder: Path, **more: Any) -> dict[str, str]:
    """The environment of a user's shell on a machine without a launcher, and a mark."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: str(folder)}
    return {**kept, **fixed, **{k: str(v) for k, v in more.items()}}


def marked(folder: Path) -> list[int]:
    """Processes that a run in this folder has started."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def run(folder: Path, commands: list[tuple[list[str], dict[str, Any]]]) -> list[tuple[int, str]]:
    """Run commands side by side; give how each one ended and what it said; none may be left."""
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(folder, **more),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, more in commands
    ]
    deadline, ended = time.monotonic() + LIMIT, []
    try:
        for process in running:
            text, _ = process.communicate(timeout=deadline - time.monotonic())
            ended.append((process.returncode, text))
        left = marked(folder)
    finally:
        for pid in marked(folder):
            os.kill(pid, signal.SIGKILL)
    assert left == [], "these processes are left"
    return ended


def script(
    folder: Path, devices: int = 2, nodes: int = 1, failing: int = -1, how: str = "raise"
) -> list[str]:
    return [str(SCRIPT), str(folder / "result"), *map(str, (devices, nodes, failing)), how]


def plainly(folder: Path, **options: Any) -> Any:
    return [(script(folder, **options), {})]


def with_torchrun(folder: Path, **options: int) -> Any:
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    return [([*module, *script(folder, **options)], {})]


def on_slurm(folder: Path, **options: int) -> Any:
    shared = {
        "SLURM_JOB_ID": 7,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_NODEID": 0,
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    tasks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(2)]
    return [(script(folder, **options), {**shared, **task}) for task in tasks]


def on_two_nodes(folder: Path, **options: int) -> Any:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = script(folder, **{"devices": 1, "nodes": 2, **options})
    return [(command, {**shared, "NODE_RANK": node}) for node in range(2)]


WAYS = {
    "plain script": (plainly, 2, "tp 2"),
    "torchrun": (with_torchrun, 2, "tp 2"),
    "slurm": (on_slurm, 2, "tp 2"),
    "two nodes": (on_two_nodes, 2, "pp 2"),
}


@pytest.fixture(scope="module")
def one_device() -> dict[str, float]:
    """What one device gives."""
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.fit(ToyModule("sgd"), loader(ToyData(12), 4), loader(ToyData(4), 4))
    metrics = {"loss": "train_loss", "val_loss": "val_loss"}
    return {name: float(trainer.callback_metrics[key]) for name, key in metrics.items()}


def check(folder: Path, ended: list[tuple[int, str]], sizes: str, world: int) -> dict[str, float]:
    assert [code for code, _ in ended] == [0] * len(ended), "\n".join(text for _, text in ended)
    found = [json.loads((folder / f"result.{rank}").read_text()) for rank in range(world)]
    assert [r["rank"] for r in found] == list(range(world))
    assert {(r["world"], r["sizes"]) for r in found} == {(world, sizes)}
    assert len({(r["loss"], r["val_loss"]) for r in found}) == 1
    said = "".join(text for _, text in ended)
    assert said.count(f"The first step on {sizes} equals that of one process.") == 1
    for _, text in ended:
        ours = re.escape(str(ROOT / "lightning_par"))
        assert not re.findall(rf"{ours}/\S+\.py:\d+: .*", text), "warnings at lines of ours"
    return dict(found[0])


# Below, two nodes start two devices each, as one node starts them; hosts/ has torchrun.
HELD = ("plain script", "two nodes", "torchrun")


@pytest.mark.parametrize("way", some(WAYS, HELD))
def test_every_launcher_gives_the_loss_of_one_device(
    way: str, tmp_path: Path, one_device: dict[str, float]
) -> None:
    make, world, sizes = WAYS[way]
    found = check(tmp_path, run(tmp_path, make(tmp_path)), sizes, world)
    for name, value in one_device.items():
        assert found[name] == pytest.approx(value, rel=1e-5)  # fp32, sums in another order


def test_two_nodes_with_two_devices_each_put_tensor_parallelism_inside_a_node(
    tmp_path: Path, one_device: dict[str, float]
) -> None:
    found = check(tmp_path, run(tmp_path, on_two_nodes(tmp_path, devices=2)), "pp 2 x tp 2", 4)
    for name, value in one_device.items():
        assert found[name] == pytest.approx(value, rel=1e-5)


# A process that another one has started ends them all when it is killed, too: see below.
@pytest.mark.parametrize(
    ("devices", "failing"), [(2, 0), pytest.param(4, 1, marks=pytest.mark.exhaustive)]
)
def test_script_that_raises_on_one_rank_ends_everywhere(
    devices: int, failing: int, tmp_path: Path
) -> None:
    """The user sees the rank's own message, and no process waits for it."""
    ((code, text),) = run(tmp_path, plainly(tmp_path, devices=devices, failing=failing))
    assert code != 0
    assert f"KeyError: 'no key on {failing}'" in text
    assert text.count("Traceback (most recent call last)") == 1
    others = re.findall(r"rank (\d) \([^)]*\), in [^:\n]*, cannot continue", text)
    assert others == ([] if failing == 0 else ["0"]), text
    assert "waited here" not in text, "stacks of a rank that is not the cause"


@pytest.mark.parametrize(
    ("devices", "failing", "place"),
    [(2, 1, "tp 1"), pytest.param(4, 2, "pp 1, tp 0", marks=pytest.mark.exhaustive)],
)
def test_killed_process_ends_the_script_everywhere(
    devices: int, failing: int, place: str, tmp_path: Path
) -> None:
    """The user reads which rank is gone, what it was doing and what to do."""
    command = plainly(tmp_path, devices=devices, failing=failing, how="kill")
    ((code, text),) = run(tmp_path, command)
    assert code != 0
    assert f"rank {failing} ({place}) has died, in start of the batch, step 1. Its process" in text
    assert "Restart from the last checkpoint (ckpt_path='last')." in text


ALLOCATION = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_JOB_NAME": "train"}
"""What `salloc` leaves to the user: srun, or one process that starts the others."""


def test_allocation_of_slurm_without_srun_is_told_how_to_start(tmp_path: Path) -> None:
    ((code, text),) = run(tmp_path, [(script(tmp_path), ALLOCATION)])
    assert code != 0
    assert re.search(
        r"SLURM_PROCID.*Start the 2 processes with srun\. Or set SLURM_JOB_NAME=b", text
    )


def test_lines_of_a_prompt_run_from_a_file_as_bash(
    tmp_path: Path, one_device: dict[str, float]
) -> None:
    """From the file in an allocation of SLURM, by the name of a job that the message gives."""
    lines = (
        "import sys",
        f"sys.argv[1:] = {script(tmp_path)[1:]}",
        "from tests.contract.train_script import main",
        "main()",
    )
    text = "\n".join([*lines, ""])
    prompt = subprocess.run(
        [sys.executable, "-i"],
        input=text,
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "2 devices need 2 processes" in prompt.stderr
    assert "`%%writefile train.py`, and run `!python train.py`" in prompt.stderr
    (tmp_path / "train.py").write_text(text)
    as_bash = {**ALLOCATION, "SLURM_JOB_NAME": "bash"}
    found = check(tmp_path, run(tmp_path, [(["train.py"], as_bash)]), "tp 2", 2)
    for name, value in one_device.items():
        assert found[name] == pytest.approx(value, rel=1e-5)
