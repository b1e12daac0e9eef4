"""SLURM on the hosts of a test: its own daemons, a key of its own, and nothing outside."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.hosts import Hosts

__all__ = ["Slurm", "refusal"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
# A job that was requeued waits until its old credential has expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# No cgroups: a container may have none to give.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
KillWait=5
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PATIENCE = 240.0


def refusal() -> str | None:
    """Say why SLURM cannot run here; None if it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"SLURM needs {', '.join(absent)} (Debian: slurm-wlm)" if absent else None


class Slurm:
    """A cluster of some hosts.

    Args:
        hosts: The first one has the controller.
        folder: For configuration, state and logs.
        cores: Of each host.
    """

    def __init__(self, hosts: Hosts, folder: Path, cores: int = 2) -> None:
        self._hosts, self._first = hosts, hosts[0]
        self._variables = {"SLURM_CONF": folder / "slurm.conf", "HOME": folder}
        for name in ("state", "munge"):
            (folder / name).mkdir(parents=True, mode=0o755)
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        nodes = [f"NodeName={h.name} NodeAddr={h.address()} CPUs={cores}" for h in hosts]
        own = {"folder": folder, "first": hosts[0].name, "address": hosts[0].address()}
        text = _CONFIGURATION.format(**own, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        own_files = [f"--{option}={folder}/munge/{name}" for option, name in files.items()]
        self._first.run(["munged", "--foreground", "--force", f"--key-file={key}", *own_files])
        self._until(lambda: (folder / "munge" / "socket").exists())
        self._first.run(["slurmctld", "-D", "-c"], **self._variables)
        for host in hosts:
            host.run(["slurmd", "-D", "-N", host.name], **self._variables)
        self._until(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == f"{len(hosts)} idle")

    def ask(self, *words: object) -> str:
        """Run a command on the first host, and return what it says."""
        task = self._first.run(words, **self._variables)
        self._until(lambda: task.code is not None)
        return task.text().strip()

    def submit(self, options: Sequence[str], script: str) -> int:
        """Submit a batch script, and return the number of its job."""
        path = self._first.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        return int(self.ask("sbatch", "--parsable", *options, path).partition(";")[0])

    def texts(self) -> str:
        """Return what everybody said, for a failing test."""
        return self._hosts.texts()

    def wait(self, job: int) -> str:
        """Wait until a job has ended, and return how, such as ``COMPLETED``."""
        self._until(lambda: self._state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
        return self._state(job)

    def _state(self, job: int) -> str:
        said = self.ask("scontrol", "show", "job", "-o", job)
        return said.partition("JobState=")[2].partition(" ")[0]

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, self._hosts.texts()
            time.sleep(0.2)
