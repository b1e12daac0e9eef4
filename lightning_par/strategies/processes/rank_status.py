"""What the ranks of one node are doing and whether they live, readable by each of them.

Note [Locks tell deaths]: every rank holds a lock on its own part of a shared file. The kernel gives
it back when the process ends in whatever way, hence a death is seen by every rank, at once, also
that of a process that its parent has not waited for.
"""

import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap
from pathlib import Path

from lightning_par.engine.activity import Activity, ActivityRecord, RECORD_SIZE

__all__ = ["RankState", "RankStatus", "RankStatusFile"]

_FAULT = 600
"""Bytes of what a rank says of its own failure."""
_STATUS = struct.Struct(f"<qqd{_FAULT}s")
_SLOT_SIZE = RECORD_SIZE + _STATUS.size


class RankStatus(IntEnum):
    """How a rank is, by its own account."""

    ABSENT = 0
    RUNNING = 1
    FAILED = 2
    CUT_OFF = 3
    """It failed because another rank did not answer."""
    ENDED = 4


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank at one moment.

    Attributes:
        rank: Global rank.
        pid: Process id.
        status: Status by its own account.
        when: When it changed its status, in seconds of `time.monotonic`.
        fault: The type and text of its exception, if it failed.
        is_alive: Whether its process lives.
        is_stopped: Whether its process is stopped by a signal.
        activity: What it did last.
    """

    rank: int
    pid: int
    status: RankStatus
    when: float
    fault: str
    is_alive: bool
    is_stopped: bool
    activity: ActivityRecord

    @property
    def is_dead(self) -> bool:
        """Whether it ended while it was running."""
        return self.status is RankStatus.RUNNING and not self.is_alive


class RankStatusFile:
    """The shared file of the ranks of one node; see Note [Locks tell deaths].

    Args:
        path: From `create`.
        ranks: Global ranks of the node, in the order of their slots in the file.
        rank: Global rank of this process.
        activity: Activity of this rank; kept in the file until `close`.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, ranks: Sequence[int], rank: int, activity: Activity) -> None:
        self._ranks, self._slot, self._activity = tuple(ranks), ranks.index(rank), activity
        self._file = path.open("r+b")
        self._memory = mmap(self._file.fileno(), len(ranks) * _SLOT_SIZE)
        start = self._slot * _SLOT_SIZE
        self._record = memoryview(self._memory)[start : start + RECORD_SIZE]
        self._dead: set[int] = set()  # slots; whoever asks a lock as well may make them seem alive
        # Before the status says RUNNING: without the lock it would seem dead.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
        activity.share(self._record)
        self.say(RankStatus.RUNNING)

    @staticmethod
    def create(size: int) -> Path:
        """Make the file for `size` ranks."""
        descriptor, name = tempfile.mkstemp(prefix="lightning_par-ranks-")
        with os.fdopen(descriptor, "wb") as file:
            # Zeros: ABSENT for every slot.
            file.truncate(size * _SLOT_SIZE)
        return Path(name)

    @property
    def rank(self) -> int:
        """This global rank."""
        return self._ranks[self._slot]

    def say(self, status: RankStatus, fault: str = "") -> None:
        """Change the status of this rank."""
        place = self._slot * _SLOT_SIZE + RECORD_SIZE
        text = fault.encode()
        if len(text) > _FAULT:  # whole words, and a sign that there is more
            text = text[: _FAULT - 4].rpartition(b" ")[0] + b" ..."
        _STATUS.pack_into(self._memory, place, os.getpid(), status, time.monotonic(), text)

    def look(self) -> list[RankState]:
        """Return the state of every rank of the node."""
        return [self._look(slot) for slot in range(len(self._ranks))]

    def _look(self, slot: int) -> RankState:
        start = slot * _SLOT_SIZE
        # One copy, as the other process may write meanwhile.
        seen = bytes(self._memory[start : start + _SLOT_SIZE])
        pid, status, when, fault = _STATUS.unpack_from(seen, RECORD_SIZE)
        # Once dead, always dead: another rank that asks the lock holds it for a moment.
        is_alive = slot not in self._dead and (slot == self._slot or self._is_locked(start))
        if status != RankStatus.ABSENT and not is_alive:
            self._dead.add(slot)
        return RankState(
            rank=self._ranks[slot],
            pid=pid,
            status=RankStatus(status),
            when=when,
            fault=fault.rstrip(b"\0").decode(errors="replace"),
            is_alive=is_alive,
            is_stopped=is_alive and _is_stopped(pid),
            activity=ActivityRecord.read(seen[:RECORD_SIZE]),
        )

    def _is_locked(self, start: int) -> bool:
        """Whether another process holds the lock. Two that ask at once may both hear yes, once."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
        except OSError:
            return True
        # Given back at once, or others would take the slot for alive.
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, start)
        return False

    def close(self) -> None:
        """Give the slot up; a rank that is running has ended well."""
        if self._look(self._slot).status is RankStatus.RUNNING:
            self.say(RankStatus.ENDED)
        # The activity goes on, in memory that does not go away.
        self._activity.share(bytearray(RECORD_SIZE))
        self._record.release()
        self._memory.close()
        self._file.close()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; where the system has no /proc nobody knows."""
    try:
        # The name of the process, in parentheses, may hold anything: the state comes behind the
        # last one.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"
