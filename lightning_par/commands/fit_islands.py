"""``lightning-par fit --islands``: a server and the islands of one machine."""

import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from lightning_par.commands import FitArguments, PathName, quick_imports
from lightning_par.engine.data.islands.environment import (
    ISLAND_VARIABLE,
    KEY_VARIABLE,
    read_key,
    SERVER_VARIABLE,
)
from lightning_par.errors import ConfigurationError, raise_problems

__all__ = ["Islands", "fit_islands"]

_log = logging.getLogger(__name__)
_PERIOD = 0.2
"""Seconds between two looks at the islands."""
_GRACE = 60.0
"""Seconds within which an island has to end after a signal; saving a checkpoint takes a while."""


def fit_islands(
    *, islands: int, restarts: int = 0, state: PathName | None = None, fit: FitArguments
) -> int:
    """Train on several islands of this machine: start a server and the islands, and restart them.

    All other options are those of lightning-par fit, for each island; its strategy needs outer=.
    Exits with status 1 if an island was given up, and with 128 + its number after a signal.

    Args:
        islands: Number of islands.
        restarts: How often an island that fails is started again.
        state: Folder to which the server saves.
        fit: Arguments of every island.

    Raises:
        ConfigurationError: A number makes no sense, or there is no key.
    """
    problems = []
    if islands < 1:
        problems.append(f"--islands={islands} must be 1 or more.")
    if restarts < 0:
        problems.append(f"--restarts={restarts} must be 0 or more.")
    raise_problems(ConfigurationError, "LP902", problems)
    with quick_imports():
        from lightning_par.engine.data.islands.server import IslandServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)
    server = IslandServer("127.0.0.1", 0, read_key(None, key), state=Path(state) if state else None)
    place = {KEY_VARIABLE: key, SERVER_VARIABLE: f"127.0.0.1:{server.port}"}
    command = [sys.executable, "-m", "lightning_par.cli", "fit", *fit]
    try:
        return Islands(command, islands, restarts, place).run()
    finally:
        server.close()


class Islands:
    """The processes of all islands; those that fail are started again.

    Args:
        command: Starts one island.
        count: Number of islands.
        restarts: How often each may be started again.
        environment: Variables of every island, besides those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        restarts: int,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._command, self._count = list(command), count
        self._environment = {**_share_of_machine(count), **os.environ, **environment}
        self._left = [restarts] * count
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._signal: int | None = None
        self._deadline = math.inf

    def run(self) -> int:
        """Start the islands and wait until the last one has ended; return the exit status."""
        caught = signal.SIGTERM, signal.SIGINT
        before = {number: signal.signal(number, self._stop) for number in caught}
        given_up = False
        try:
            for island in range(self._count):
                self._start(island)
            while self._running:
                time.sleep(_PERIOD)
                if time.monotonic() > self._deadline:
                    break
                for island, process in list(self._running.items()):
                    status = process.poll()
                    if status is not None:
                        del self._running[island]
                        given_up |= not self._end(island, status)
            return (1 if given_up else 0) if self._signal is None else 128 + self._signal
        finally:
            for process in self._running.values():
                process.kill()
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, island: int) -> None:
        place = {ISLAND_VARIABLE: f"{island}/{self._count}", **_devices(island, self._count)}
        # Of a session of its own: a terminal's Ctrl-C reaches it once, through `_stop`.
        self._running[island] = subprocess.Popen(
            self._command, env={**self._environment, **place}, start_new_session=True
        )

    def _end(self, island: int, status: int) -> bool:
        """Take note of an island that has ended; return whether all is well, or will be."""
        if status == 0 or self._signal is not None:
            return True
        said = f"signal {-status}" if status < 0 else f"status {status}"
        if not self._left[island]:
            others = f"; {len(self._running)} continue without it" if self._running else ""
            _log.error("island %d has ended with %s%s", island, said, others)
            return False
        self._left[island] -= 1
        _log.warning(
            "island %d has ended with %s; it is started again (%d restarts left)",
            *(island, said, self._left[island]),
        )
        self._start(island)
        return True

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Send a signal on to the islands; those that do not end in time are killed."""
        self._signal = number
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)
        self._deadline = time.monotonic() + _GRACE


def _share_of_machine(count: int) -> dict[str, str]:
    """Return what divides the cores among the islands, if the environment does not say it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // count))}


def _devices(island: int, count: int) -> dict[str, str]:
    """Return what gives an island its share of the CUDA devices, if there is one for each."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    share = len(devices) // count
    if not share:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[island * share : (island + 1) * share])}
