"""A run under torchrun whose hosts are killed again and again, and which goes on every time."""

import contextlib
import gc
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.support.host_runs import PORT
from tests.support.hosts import Host, Hosts, open_hosts, Task
from tests.support.parity import quiet_trainer

__all__ = ["LOST", "SAVE_EVERY", "Killed", "read_losses", "run_and_kill", "undisturbed_losses"]

LOST = re.compile(
    r"starts after step (\d+), but the previous run in .* had reached step (\d+)\. "
    r"The number of steps that are computed again is (\d+)\."
)
BATCH, TOKENS, SAVE_EVERY = 8, 16, 3
_CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
_WHOLE = 5
"""Of so many kills one is of a whole host, whose agent torchrun misses only after minutes."""
_PATIENCE = 400.0
"""Seconds in which a run has to come to its next step, on a busy machine."""


class _Losses(Callback):
    """Writes the loss of every step; also of those that are computed again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train_loss"])
            with self._path.open("a") as file:
                file.write(f"{trainer.global_step} {loss!r}\n")


def train_to_the_end(
    out: Path,
    steps: int,
    hosts: int = 1,
    devices: int = 1,
    start: str | None = None,
    every: int = SAVE_EVERY,
) -> None:
    """Train: tp inside a host, dp across. `start` is the Trainer's ``ckpt_path``."""
    import lightning_par
    from lightning_par.models import GPTModule, TextDataModule

    class Module(GPTModule):
        """Logs the loss of the whole batch."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self._loss(batch)
            self.log("train_loss", loss, sync_dist=True)
            return loss

    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    strategy = lightning_par.Hybrid3DStrategy(
        tensor_parallel_size=devices,
        pipeline_parallel_size=1,
        data_parallel_size=hosts,
        zero_stage=3,
        timeout=timedelta(seconds=60),
    )
    saving = ModelCheckpoint(out / "saved", save_last=True, every_n_train_steps=every)
    trainer = quiet_trainer(
        devices=devices,
        num_nodes=hosts,
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        default_root_dir=out,
        enable_checkpointing=True,
        callbacks=[saving, _Losses(out / "losses")],
        limit_val_batches=0,
    )
    small = {"model_dim": 16, "num_layers": 2, "num_kv_heads": 2}
    data = TextDataModule(length=TOKENS, batch_size=BATCH // hosts, max_bytes=50_000)
    trainer.fit(Module(overrides=small, warmup_steps=2), data, ckpt_path=start)


def undisturbed_losses(out: Path, steps: int) -> dict[int, float]:
    """Losses by step of one process that nobody kills."""
    try:
        train_to_the_end(out, steps)
    finally:
        torch.set_default_dtype(torch.float32)
    return dict(read_losses(out))


def read_losses(out: Path) -> list[tuple[int, float]]:
    """Step and loss of every batch so far; of steps that were lost more than once."""
    path = out / "losses"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), float(loss)) for step, loss in lines]


class RestartedRun:
    """Agents of torchrun, one on each host, each started again when it has failed.

    Args:
        hosts: Where.
        out: Folder that they share.
        steps: Optimizer steps of the run.
        devices: Ranks on each host.
        fewest: With how many hosts the run goes on, at least.
    """

    def __init__(self, hosts: Hosts, out: Path, steps: int, devices: int, fewest: int) -> None:
        self.hosts, self.out, self.steps = hosts, out, steps
        nodes = str(len(hosts)) if fewest == len(hosts) else f"{fewest}:{len(hosts)}"
        self._words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        self._words += ["--nproc-per-node", str(devices), "--max-restarts", "100"]
        self._words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{PORT}"]
        self._words += ["--rdzv-id", "1", "--rdzv-conf", _CONF]
        self._words += [__file__, str(out), str(steps)]
        self.agents: dict[int, Task] = {}
        for host in hosts:
            self.start(host)

    def start(self, host: Host) -> None:
        """Start the agent of a host."""
        self.agents[host.number] = host.run(self._words)

    def kill_ranks(self, host: Host) -> None:
        """Kill the ranks of a host; its agent lives."""
        for pid in host.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"torch.distributed.run" not in words and __file__.encode() in words:
                    os.kill(pid, signal.SIGKILL)

    def wait_for(self, step: int) -> None:
        """Wait until a step was computed once more; start agents that failed, as init would."""
        seen, deadline = len(read_losses(self.out)), time.monotonic() + _PATIENCE
        while not any(done >= step for done, _ in read_losses(self.out)[seen:]):
            assert time.monotonic() < deadline, self.hosts.texts()
            if all(agent.code == 0 for agent in self.agents.values()):
                return
            for number, agent in self.agents.items():
                if agent.code:
                    self.start(self.hosts[number])
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait until the agents of this run have ended well."""
        self.wait_for(self.steps + 1)

    def forget(self, host: Host) -> None:
        """Do not wait for a host any more, nor start its agent again."""
        del self.agents[host.number]


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What became of a run whose hosts were killed.

    Attributes:
        losses: Step and loss of every batch; of steps that were lost more than once.
        lost: Of the restarts that said so: after which step they began, how far the run before had
            come, and how many steps were lost.
        killed: What was killed, in order.
        left: What is left on the hosts, but for torchrun's logs.
    """

    losses: Sequence[tuple[int, float]]
    lost: Sequence[tuple[int, ...]]
    killed: Sequence[str]
    left: Sequence[str]


def run_and_kill(
    folder: Path, *, kills: int, steps: int, seed: int = 0, devices: int = 1, leaves: bool = False
) -> Killed:
    """Kill hosts of a run, a random one after a random number of steps.

    Args:
        folder: For logs and checkpoints.
        kills: How often.
        steps: Optimizer steps of the run, enough for all kills.
        seed: Of the choices.
        devices: Ranks on each of the two hosts.
        leaves: Whether the second host is killed whole, once, and does not come back.
    """
    chance, killed = random.Random(seed), list[str]()
    folder.mkdir(exist_ok=True)
    with open_hosts(2, folder) as hosts:
        run = RestartedRun(hosts, folder, steps, devices, fewest=1 if leaves else 2)
        for number in range(kills):
            done = max([0, *(step for step, _ in read_losses(folder))])
            run.wait_for(max(done, SAVE_EVERY) + chance.randint(1, 2 * SAVE_EVERY))
            host = hosts[1 if leaves else chance.randrange(2)]
            whole = leaves or number % _WHOLE == 1
            killed.append(f"{'all of' if whole else 'ranks of'} {host.name}")
            if leaves:
                run.forget(host)
            if whole:
                host.signal(signal.SIGKILL)
            else:
                run.kill_ranks(host)
        run.wait()
        lost = [tuple(map(int, found)) for found in LOST.findall(hosts.texts())]
        left = [what for host in hosts for what in host.left() if "/torchelastic_" not in what]
        return Killed(losses=read_losses(folder), lost=lost, killed=killed, left=left)


def _place() -> tuple[int, int]:
    """How many hosts, and how many ranks on each, torchrun or SLURM has started."""
    if "SLURM_NNODES" in os.environ:
        return int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    return int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])


if __name__ == "__main__":  # as a user's script, which a launcher starts once for each device
    gc.freeze()  # what is imported stays; the end is a second quicker
    every = int(os.environ.get("SAVE_EVERY", SAVE_EVERY))
    train_to_the_end(Path(sys.argv[1]), int(sys.argv[2]), *_place(), "last", every)
