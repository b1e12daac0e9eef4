"""Activity record: what this rank is doing, for messages about a rank that died, hung or raised.

Note [Record in shared memory]: a rank that is killed cannot report anything. So the record is a few
bytes of memory that another process of the node may map; writing it costs less than a microsecond,
and the last record is still there when its writer is gone.
"""

import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic  # by name: nobody who replaces time.monotonic sees ours

__all__ = ["BETWEEN_STEPS", "RECORD_SIZE", "Activity", "ActivityRecord", "resident_memory"]

_STATM = "/proc/self/statm"
_KEPT = 64
"""Steps of which is kept what was held after them."""
_FIRST = 8
"""Steps that are kept however fast they are."""
_PERIOD = 1.0
"""Seconds between two steps that are kept from then on."""
BETWEEN_STEPS = "between steps"
"""Action of a rank after an optimizer step, where hooks of the user run."""

# Little-endian and without padding: another process of the node reads the same bytes.
_LAYOUT = struct.Struct("<dqqq40s")
RECORD_SIZE = _LAYOUT.size
"""Bytes of a record."""


@dataclass(frozen=True, kw_only=True)
class ActivityRecord:
    """What a rank was doing at one moment.

    Attributes:
        since: Start of the action, in seconds of `time.monotonic`.
        stage: Pipeline stage, or -1 outside of a schedule.
        step: Number of optimizer steps made before, or -1 outside of training.
        micro_batch: Index of the micro-batch, or -1.
        action: Name such as ``"backward"``.
    """

    since: float
    stage: int
    step: int
    micro_batch: int
    action: str

    @classmethod
    def read(cls, record: bytes) -> "ActivityRecord":
        """Decode what `Activity` wrote into `record`, of `RECORD_SIZE` bytes."""
        since, stage, step, micro_batch, action = _LAYOUT.unpack(record)
        text = action.rstrip(b"\0").decode(errors="replace")
        return cls(since=since, stage=stage, step=step, micro_batch=micro_batch, action=text)

    def __str__(self) -> str:
        """Give ``stage 1, backward of micro-batch 3, step 17``."""
        if not self.action:  # nothing was recorded yet: the numbers are zeros
            return "starting"
        action = self.action
        if self.micro_batch >= 0:
            action += f" of micro-batch {self.micro_batch}"
        parts = [f"stage {self.stage}"] if self.stage >= 0 else []
        parts += [action, *([f"step {self.step}"] if self.step >= 0 else [])]
        return ", ".join(parts)


class Activity:
    """Writer of this rank's activity record; see Note [Record in shared memory].

    Attributes:
        step: Optimizer steps made so far, -1 outside of training.
        ended: Of the first steps, and of one in a second: number, `time.monotonic`, and the bytes
            held after it.
        held: Returns the bytes that this rank holds; by default those of its process in memory.
    """

    def __init__(self) -> None:
        self.step = -1
        self.ended: deque[tuple[int, float, int]] = deque(maxlen=_KEPT)
        self.held: Callable[[], int] = resident_memory
        self._memory: bytearray | memoryview = bytearray(RECORD_SIZE)

    def __reduce__(self) -> tuple[type["Activity"], tuple[()]]:
        """Copy and pickle as a new, empty record: the memory belongs to this process."""
        return Activity, ()

    def share(self, memory: bytearray | memoryview) -> None:
        """Move the record to `memory`, of `RECORD_SIZE` bytes."""
        # What was recorded so far goes along: a reader must not find an empty record.
        memory[:] = bytes(self._memory)
        self._memory = memory

    def begin(self, action: str, micro_batch: int = -1, stage: int = -1) -> None:
        """Record the action that begins now.

        Args:
            action: Name such as ``"backward"``; at most 40 bytes.
            micro_batch: Index of the micro-batch, if the action has one.
            stage: Pipeline stage, if the action is one of a schedule.
        """
        # `pack_into` cuts and pads the text to 40 bytes: no length is checked in every action.
        _LAYOUT.pack_into(
            self._memory, 0, monotonic(), stage, self.step, micro_batch, action.encode()
        )

    def end_step(self) -> None:
        """Record that the optimizer has stepped and, at times, what is held now."""
        self.begin(BETWEEN_STEPS)
        # Asking a device takes longer than the rest: of fast steps, one in a second is enough.
        now = monotonic()
        if len(self.ended) < _FIRST or now - self.ended[-1][1] > _PERIOD:
            self.ended.append((self.step, now, self.held()))

    def now(self) -> ActivityRecord:
        """Return the current record."""
        return ActivityRecord.read(bytes(self._memory))


def resident_memory() -> int:
    """Return the bytes of this process in memory; 0 where the system does not say."""
    # Neither a Path nor a file object: it is read after every step.
    with suppress(OSError):
        file = os.open(_STATM, os.O_RDONLY)
        try:
            return int(os.read(file, 64).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(file)
    return 0
