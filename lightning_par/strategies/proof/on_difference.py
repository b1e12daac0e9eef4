"""What follows a difference from one process, and the file of the hosts that are left out then."""

import logging
import os
import socket
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_par.errors import VerificationError
from lightning_par.strategies.proof.gathering import from_first

__all__ = ["ENDS", "FAULTY_HOSTS", "follow", "host_name", "refuse_faulty_hosts"]

FAULTY_HOSTS = "faulty_hosts.txt"
"""Name of the file, in the `default_root_dir` of the Trainer: of each host its name, on a line."""
ENDS = "The run ends after this step, and no checkpoint of it was saved."
_logger = logging.getLogger(__name__)


def host_name() -> str:
    """Return the name of this host; that of SLURM, which knows it by that one, if there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def follow(error: VerificationError, trainer: pl.Trainer, policy: str) -> None:
    """Do what the user wants after a difference, on every rank.

    Args:
        error: It.
        trainer: That of the run.
        policy: The option `on_difference`.

    Raises:
        VerificationError: `error`, if the run ends.

    **Communicates**: whether the file of faulty hosts was written.
    """
    if policy == "warn":
        if dist.get_rank() == 0:
            goes_on = 'The run goes on, because of on_difference="warn".'
            text = str(error)
            _logger.warning(text.replace(ENDS, goes_on) if ENDS in text else f"{text} {goes_on}")
        return
    # Of several hosts nobody knows which one it was.
    if policy == "evict" and len(set(error.hosts)) == 1:
        host, path = error.hosts[0], _path(trainer)
        # Written before the others end: a launcher ends all ranks as soon as the first one has.
        failed = from_first(_add(path, host) if dist.get_rank() == 0 else "")
        slurm = "" if "://" in path else f' (with SLURM --exclude="$(paste -sd, {path})")'
        error.add_note(
            f"The host {host} could not be written to {path}: {failed} Start the run again without "
            "this host, from the last checkpoint."
            if failed
            else f"{path} lists the host {host} from now on. Start the run again without it"
            f"{slurm}, from the last checkpoint."
        )
    raise error


def refuse_faulty_hosts(trainer: pl.Trainer, policy: str) -> None:
    """Refuse a run on a host that an earlier run has left out.

    Args:
        trainer: That of the run.
        policy: The option `on_difference`; only "evict" reads the file.

    Raises:
        VerificationError: On every rank, if some are on such a host.

    **Communicates**: the names of all hosts, and of those in the file of rank 0.
    """
    if policy != "evict" or trainer.world_size == 1:
        return
    names: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(names, host_name())
    path = _path(trainer)
    listed = from_first(_listed(path) if dist.get_rank() == 0 else None)
    found = [name for name in dict.fromkeys(names) if name in listed]
    if found:
        ranks = [str(rank) for rank, name in enumerate(names) if name in found]
        raise VerificationError(
            "LP810",
            f"an earlier run has found a faulty device on the host {', '.join(found)}, on which "
            f"the ranks {', '.join(ranks)} of this run are. The file {path} lists that host. "
            "Start the run without it; or, if the device has been replaced or tested since, "
            "remove its line from the file.",
        )


def _path(trainer: pl.Trainer) -> str:
    return f"{str(trainer.default_root_dir).rstrip('/')}/{FAULTY_HOSTS}"


def _read(path: str) -> list[str]:
    files = get_filesystem(path)
    if not files.exists(path):
        return []
    with files.open(path, "r") as file:
        return [line.strip() for line in file if line.strip()]


def _listed(path: str) -> list[str]:
    try:
        return _read(path)
    except Exception as error:  # whatever a file system raises, on this rank alone
        _logger.warning("the file %s of faulty hosts cannot be read: %s", path, error)
        return []


def _add(path: str, host: str) -> str:
    """Write a host into the file; return why that failed, or nothing."""
    try:
        listed = _read(path)
        if host not in listed:
            files = get_filesystem(path)
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with files.open(path, "w") as file:
                file.writelines(f"{name}\n" for name in [*listed, host])
    except Exception as error:  # whatever a file system raises: the error of the run matters more
        return f"{type(error).__name__}: {error}."
    return ""
