"""Clocks for timing a step, and the offsets between the clocks of hosts.

A mark is a point in time that is cheap to take while a step runs and is read afterwards: on the CPU
a number, on a GPU an event in the stream, because the program is far ahead of the device there.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Clock", "ClockOffset", "DeviceClock", "HostClock", "clock_for", "measure_offset"]

_ROUNDS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Takes cheap marks during a step, and converts them to seconds later."""

    def mark(self) -> Any:
        """Return this point in time."""

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Convert marks to seconds of `time.monotonic`."""


class HostClock:
    """Marks are seconds of `time.monotonic`, which all processes of a host share."""

    # Bound as it is, so that a mark costs no call of Python.
    mark = staticmethod(time.monotonic)

    def read(self, marks: Sequence[float]) -> list[float]:
        """Return the marks, which are seconds already."""
        return list(marks)


class DeviceClock:
    """Marks are CUDA events in the current stream; reading them waits for the device once.

    The seconds are those of `time.monotonic` at which the device reached the event, to within the
    microseconds that it takes the host to see that an event is done.

    Args:
        device: The CUDA device whose current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Return when the device reached each event.

        Elapsed times are single-precision milliseconds. They are taken from an event that is
        recorded now, not at the start of the run, so that they stay short.
        """
        if not marks:
            return []
        torch.cuda.synchronize(self._device)
        anchor = self.mark()
        anchor.synchronize()
        now = time.monotonic()
        # Device time between two events, counted back from a moment that both clocks know.
        return [now - event.elapsed_time(anchor) / 1e3 for event in marks]


def clock_for(device: torch.device) -> Clock:
    """Return the clock that times what a device computes."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """Offset to add to this rank's clock to get that of the group's first rank.

    Attributes:
        seconds: The offset; exactly 0 on the host of the first rank.
        error: Upper bound of its error, in seconds.
    """

    seconds: float
    error: float


def measure_offset(
    group: dist.ProcessGroup,
    *,
    now: Callable[[], float] = time.monotonic,
    host: str | None = None,
) -> ClockOffset:
    """Measure the offset between this host's clock and that of the first rank's host.

    One rank of every other host asks the first rank for its time, several times (Cristian's
    algorithm). The answer with the shortest round trip counts: the first rank's clock was read
    somewhere within it, so that the middle is wrong by at most half of it.

    Args:
        group: Every rank of it has to call.
        now: Clock of this rank, in seconds.
        host: Name of this host; by default its node name and boot id.

    Returns:
        The offset of this rank.

    **Communicates**: two small objects of every rank to all, and 8 round trips of 8 bytes between
    the first rank and one rank of every other host.
    """
    # With the boot id, as containers of one host may have names of their own, and hosts the same.
    name = _host_name() if host is None else host
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, name, group=group)
    # One rank for each host other than that of the first rank.
    # Ranks of one host share a clock, so that one of them asks for all.
    leaders = {hosts.index(other): other for other in dict.fromkeys(hosts) if other != hosts[0]}
    found = ClockOffset(seconds=0.0, error=0.0)
    rank = group.rank()
    # One pair after the other, in the same order on every rank: others wait in the gather below.
    for leader in leaders:
        if rank == 0:
            _answer(group, leader, now)
        elif rank == leader:
            found = _ask(group, now)
    offsets: list[Any] = [None] * group.size()
    dist.all_gather_object(offsets, found, group=group)
    offset: ClockOffset = offsets[hosts.index(name)]
    return offset


def _host_name() -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _ask(group: dist.ProcessGroup, now: Callable[[], float]) -> ClockOffset:
    """Ask the first rank for its time, and return the offset of this rank's clock."""
    first = dist.get_global_rank(group, 0)
    message = _message(group)
    best = ClockOffset(seconds=0.0, error=float("inf"))
    for _ in range(_ROUNDS):
        asked = now()
        dist.send(message, first, group=group)
        dist.recv(message, first, group=group)
        theirs, answered = float(message), now()
        error = (answered - asked) / 2
        # The shortest round trip has the tightest bound: the reading lies within it.
        if error < best.error:
            best = ClockOffset(seconds=theirs - (asked + answered) / 2, error=error)
    return best


def _answer(group: dist.ProcessGroup, leader: int, now: Callable[[], float]) -> None:
    """Answer another rank's questions for the time."""
    other = dist.get_global_rank(group, leader)
    message = _message(group)
    for _ in range(_ROUNDS):
        dist.recv(message, other, group=group)
        dist.send(message.fill_(now()), other, group=group)


def _message(group: dist.ProcessGroup) -> torch.Tensor:
    # "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
    # Between the hosts where there is a way: a device would add its own delay.
    device = "cpu" if "cpu" in devices else devices[0]
    return torch.zeros((), dtype=torch.float64, device=device)
