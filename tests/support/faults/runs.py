"""Runs in which one rank is killed, stopped, raises or never returns; used by tests and benchmarks.

Every rank is a process of its own under a Trainer, forked from one that has imported everything, as
if it had been started with LOCAL_RANK set.
"""

import contextlib
import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.support.models.toy_gpt import ToyData, ToyModule
from tests.support.parity import quiet_trainer

__all__ = ["Fault", "FaultRun", "listeners", "run_with_fault"]

_MARK = "fault at "


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: "kill", "stop", "raise", "loop" or "save", a checkpoint on one rank; "kill worker" of
            its loader; or, when its loader gives a sample of the step, "sample raises" and "sample
            loops" or, in a process of the loader, "sample loops in a worker".
        rank: Where.
        step: In which optimizer step.
        delay: Seconds after the start of that step, for "kill" and "stop".
    """

    kind: str
    rank: int
    step: int
    delay: float = 0.0


@dataclass(kw_only=True)
class FaultRun:
    """What became of a run.

    Attributes:
        seconds: From the fault to the end of every rank; None for a rank that did not end.
        codes: How every rank ended.
        logs: What every rank said.
    """

    seconds: list[float | None] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    def blames(self, pattern: str) -> list[int]:
        """Return the ranks whose log holds a line that matches."""
        return [rank for rank, log in enumerate(self.logs) if re.search(pattern, log)]


class _Faulty(ToyModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__("sgd", blocks=2)
        self.fault = fault

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        fault = self.fault
        if batch_idx == 1:
            _say(f"listens on {', '.join(listeners())}")
        if self.global_rank != fault.rank or self.trainer.global_step != fault.step:
            return
        if fault.kind.startswith("sample"):
            return
        if fault.kind in ("kill", "stop"):
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            threading.Timer(fault.delay, _hit, [lambda: os.kill(os.getpid(), number)]).start()
        else:
            acts = {"loop": _wait_for_ever, "save": self.save, "kill worker": _kill_workers}
            _hit(acts.get(fault.kind, _fail))

    def save(self) -> None:
        self.trainer.save_checkpoint("alone.ckpt")


def _hit(act: Callable[[], None]) -> None:
    _say(f"{_MARK}{time.monotonic()}")
    act()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def listeners() -> list[str]:
    """Return the addresses on which this process waits for connections; needs Linux's /proc."""
    inodes, found = set(), []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                address = bytes.fromhex(local.partition(":")[0])[::-1]
                found.append(socket.inet_ntoa(address) if len(address) == 4 else address.hex())
    return found


class _FaultySamples(ToyData):
    """Samples of which one is not to be had on one rank."""

    def __init__(self, fault: Fault, rank: int) -> None:
        super().__init__(4000)
        self.fault, self.place = fault, 4 * fault.step if rank == fault.rank else -1

    def __getitem__(self, index: int) -> Any:
        if index == self.place and self.fault.kind.startswith("sample"):
            _hit(_fail if self.fault.kind == "sample raises" else _wait_for_ever)
        return super().__getitem__(index)


def _kill_workers() -> None:
    for worker in mp.active_children():
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)


def _fail() -> None:
    raise KeyError("no such key")


def _wait_for_ever() -> None:
    _say(f"hangs in process {os.getpid()}")
    threading.Event().wait()


def _rank(rank: int, world: int, port: int, folder: Path, fault: Fault, timeout: float) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    import lightning_par

    strategy = lightning_par.Hybrid3DStrategy(timeout=timedelta(seconds=timeout))
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=fault.step + 100)
    try:
        workers = int("worker" in fault.kind or fault.kind == "sample raises")
        # As in a script: where this process is from would have a server start the workers.
        context = "fork" if workers else None
        data = _FaultySamples(fault, rank)
        trainer.fit(
            _Faulty(fault),
            DataLoader(data, 4, num_workers=workers, multiprocessing_context=context),
        )
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as Python does
        sys.stderr.flush()
        raise SystemExit(1) from None


def run_with_fault(world: int, fault: Fault, folder: Path, *, timeout: float = 60.0) -> FaultRun:
    """Train until something goes wrong; give how every rank ended.

    Args:
        world: Ranks.
        fault: What goes wrong.
        folder: For the logs.
        timeout: Of the strategy, in seconds. A rank that is left 20 s after it is killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning_par", __name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(rank, world, port, folder, fault, timeout) for rank in range(world)]
    processes = [context.Process(target=_rank, args=place) for place in places]
    for process in processes:
        process.start()
    ended = _wait_for(processes, folder / f"{fault.rank}.log", timeout + 20)
    run = FaultRun(logs=[_read(folder / f"{rank}.log") for rank in range(world)])
    began = _began(run.logs[fault.rank])
    assert began is not None, run.logs
    for process in processes:
        end = ended.get(process)
        run.seconds.append(None if end is None else end - began)
        run.codes.append(process.exitcode)
    for process in processes:
        process.kill()
        process.join()
        process.close()
    return run


def _wait_for(processes: list[Any], log: Path, limit: float) -> dict[Any, float]:
    """When every process ended, until `limit` seconds after the fault, or 120 s without one."""
    pending, ended = {p.sentinel: p for p in processes}, {}
    deadline = time.monotonic() + 120
    while pending and time.monotonic() < deadline:
        for sentinel in wait(list(pending), timeout=0.05):
            ended[pending.pop(sentinel)] = time.monotonic()
        began = _began(_read(log))
        deadline = deadline if began is None else began + limit
    return ended


def _began(log: str) -> float | None:
    found = re.search(rf"{_MARK}([0-9.]+)\n", log)
    return float(found[1]) if found else None


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
