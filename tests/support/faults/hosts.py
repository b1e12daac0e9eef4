"""Runs on hosts of which one dies or freezes, or whose network is damaged, in the middle."""

import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.host_runs import start_ranks
from tests.support.hosts import Host, Hosts, open_hosts
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

__all__ = ["FAULTS", "HostFaultRun", "run_with_host_fault"]

STEPS = 40
_AT = 3
"""The step in which the fault comes."""
_AHEAD = 3600.0 if Path("/proc/self/ns/time").exists() else 0.0
"""Seconds by which the second host's clock is ahead: real hosts have started at different times."""


class _Telling(ToyModule):
    """Says every step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        sys.stderr.write(f"begins step {batch_idx}\n")
        sys.stderr.flush()


def train_long(timeout: float, devices: int, nodes: int) -> None:
    """Train until something goes wrong, or `STEPS` steps."""
    import lightning_par

    sizes = {"tensor_parallel_size": devices, "pipeline_parallel_size": nodes}
    strategy = lightning_par.Hybrid3DStrategy(**sizes, timeout=timedelta(seconds=timeout))
    trainer = quiet_trainer(devices=devices, num_nodes=nodes, strategy=strategy, max_steps=STEPS)
    trainer.fit(_Telling(blocks=nodes), loader(ToyData(4000), 4))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to one of the hosts in the middle of a run.

    Attributes:
        host: Its number.
        act: What is done.
        undo: What is done 5 s later, so that the run goes on.
        ends: Whether the processes of this host end by it.
        variables: Set for every rank, where the fault is there from the start.
    """

    host: int = 1
    act: Callable[[Host], None] | None = None
    undo: Callable[[Host], None] | None = None
    ends: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def _kill(host: Host) -> None:
    host.signal(signal.SIGKILL)


FAULTS: dict[str, Fault] = {
    "link cut for 5 s": Fault(act=Host.cut, undo=Host.join),
    "1 % of packets lost": Fault(act=lambda host: host.lose(0.01), undo=lambda host: None),
    "link cut for ever": Fault(act=Host.cut),
    "host killed": Fault(act=_kill, ends=True),
    "first host killed": Fault(host=0, act=_kill, ends=True),
    "host frozen": Fault(act=lambda host: host.signal(signal.SIGSTOP), ends=True),
    "first host frozen": Fault(host=0, act=lambda host: host.signal(signal.SIGSTOP), ends=True),
    "clocks an hour apart": Fault(),
    "no such name": Fault(variables={"MASTER_ADDR": "nohost"}),
}


@dataclass(frozen=True, kw_only=True)
class HostFaultRun:
    """What became of a run.

    Attributes:
        codes: How every rank ended, None for one that did not; of hosts that lived on.
        seconds: From the fault to the last end.
        said: What every rank said, by global rank.
        left: What is left on the hosts that lived on.
    """

    codes: Sequence[int | None]
    seconds: float
    said: Sequence[str]
    left: Sequence[str]


def run_with_host_fault(
    fault: Fault, folder: Path, *, timeout: float, nodes: int = 2, devices: int = 2
) -> HostFaultRun:
    """Train on hosts until something goes wrong.

    Args:
        fault: What goes wrong.
        folder: For logs.
        timeout: Of the strategy, in seconds; ranks have three times as long and 40 s to end.
        nodes: Number of hosts, each a pipeline stage.
        devices: Ranks on each, each a tensor-parallel shard.
    """
    with open_hosts(nodes, folder, ahead=_AHEAD) as hosts:
        began = time.monotonic()
        start_ranks(hosts, devices, train_long, timeout, devices, nodes, **fault.variables)
        if fault.act is not None:
            _wait_for_step(hosts)
            began = time.monotonic()
            fault.act(hosts[fault.host])
        if fault.undo is not None:
            time.sleep(5)
            fault.undo(hosts[fault.host])
        living = [host for host in hosts if not (fault.ends and host.number == fault.host)]
        tasks = [task for host in living for task in host.tasks]
        deadline = time.monotonic() + 3 * timeout + 40
        while any(task.code is None for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = [task.ended or time.monotonic() for task in tasks]
        return HostFaultRun(
            codes=[task.code for task in tasks],
            seconds=max(ended) - began,
            said=[task.text() for host in hosts for task in host.tasks],
            left=[what for host in living for what in host.left()],
        )


def _wait_for_step(hosts: Hosts) -> None:
    """Wait until every rank trains."""
    deadline = time.monotonic() + 120
    while not all(
        re.search(f"begins step {_AT}\n", task.text()) for host in hosts for task in host.tasks
    ):
        assert time.monotonic() < deadline, hosts.texts()
        time.sleep(0.01)
