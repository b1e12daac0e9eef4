"""What one rank did in a step, timed: its actions, its waits, its communication and its blocks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_par.engine.clock import Clock
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.executor import PipelineRun
from lightning_par.profiling.comm_volume import CommVolume, CommVolumeEntry, Transfer
from lightning_par.upstream.autograd import is_in_backward

__all__ = ["RankRecord", "StepRecord", "StepRecorder", "TimedTransfer"]


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """One communication, in seconds.

    Args:
        axis: Mesh axis, or the name of the group.
        operation: As `ledger.py` names it.
        payload: Bytes of the whole tensor.
        sent: Bytes that the rank sent.
        start: When it was called.
        end: When its result had been waited for; if nobody waited, when the call returned.
        exposed: Begin and end of every time in which the rank stood still for it.
    """

    axis: str
    operation: str
    payload: int
    sent: float
    start: float
    end: float
    exposed: tuple[tuple[float, float], ...]

    @property
    def exposed_seconds(self) -> float:
        """How long the rank stood still."""
        return sum(end - start for start, end in self.exposed)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank; all times are seconds on one clock.

    Attributes:
        step: Number of the batch.
        start: When the batch began.
        end: When it was done, optimizer included.
        actions: Of the pipeline, in the order in which they ran; empty without one.
        waits: For every action, how long the rank waited for its input.
        transfers: In the order in which they were called.
        entries: What the ledger counted.
        foreseen: What the plan says that there is to count; of fewer axes and operations.
        blocks: Block -> seconds of one forward, the mean over the micro-batches.
    """

    step: int
    start: float
    end: float
    actions: tuple[TimedAction, ...]
    waits: tuple[float, ...]
    transfers: tuple[TimedTransfer, ...]
    entries: tuple[CommVolumeEntry, ...]
    foreseen: tuple[CommVolumeEntry, ...]
    blocks: Mapping[int, float]

    def shifted(self, seconds: float) -> "StepRecord":
        """Return the same step on a clock that is ahead by so much."""
        if not seconds:
            return self
        return replace(
            self,
            start=self.start + seconds,
            end=self.end + seconds,
            actions=tuple(
                TimedAction(a.action, a.start + seconds, a.end + seconds) for a in self.actions
            ),
            transfers=tuple(
                replace(
                    t,
                    start=t.start + seconds,
                    end=t.end + seconds,
                    exposed=tuple((lo + seconds, hi + seconds) for lo, hi in t.exposed),
                )
                for t in self.transfers
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The steps of one rank that were kept, on the clock of rank 0.

    Attributes:
        rank: Global rank.
        place: Mesh axis -> coordinate, for the axes larger than 1.
        steps: In order.
        clock_error: The times are off by this many seconds at most, against rank 0.
    """

    rank: int
    place: Mapping[str, int]
    steps: tuple[StepRecord, ...]
    clock_error: float

    @property
    def name(self) -> str:
        """Such as ``rank 5 (pp 1, tp 1)``."""
        place = ", ".join(f"{axis} {at}" for axis, at in self.place.items())
        return f"rank {self.rank} ({place})" if place else f"rank {self.rank}"


@dataclass(eq=False, kw_only=True)
class _Open:
    """A step whose marks have not been read."""

    step: int
    start: Any
    end: Any
    run: PipelineRun | None
    transfers: list[Transfer]
    entries: tuple[CommVolumeEntry, ...]
    foreseen: tuple[CommVolumeEntry, ...]
    blocks: list[tuple[int, Any, Any]]


@dataclass(eq=False, kw_only=True)
class StepRecorder:
    """Records the steps of one rank; marks are read when a step is asked for.

    Args:
        clock: Takes the marks.
        ledger: Hears the communication; it has the same clock.
        blocks: Number of a block -> the block, for those of this rank.
        keep: How many steps are remembered.
    """

    clock: Clock
    ledger: CommVolume
    blocks: Mapping[int, nn.Module]
    keep: int
    _steps: list[_Open | StepRecord] = field(default_factory=list)
    _start: Any = None
    _blocks: list[tuple[int, Any, Any]] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the communication, and see the forwards of the blocks, of the steps in between."""
        handles = []
        for number, block in self.blocks.items():
            watch = _BlockWatch(self, number)
            handles.append(block.register_forward_pre_hook(watch.begin))
            handles.append(block.register_forward_hook(watch.end))
        self.ledger.listens = False
        try:
            with self.ledger:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Begin a step."""
        self.ledger.clear()
        self._blocks = []
        self.ledger.listens = True
        self._start = self.clock.mark()

    def end(
        self, step: int, run: PipelineRun | None, foreseen: tuple[CommVolumeEntry, ...] = ()
    ) -> None:
        """End the step.

        Args:
            step: Number of the batch.
            run: Its walk through the schedule, if there is a pipeline.
            foreseen: What the plan says that there is to count.
        """
        self.ledger.listens = False
        opened = _Open(
            step=step,
            start=self._start,
            end=self.clock.mark(),
            run=run,
            transfers=self.ledger.transfers,
            entries=self.ledger.entries(),
            foreseen=foreseen,
            blocks=self._blocks,
        )
        self._start = None
        self._steps = [*self._steps, opened][-self.keep :]

    def last(self) -> StepRecord:
        """Return the step that ended last."""
        return self._read(len(self._steps) - 1)

    def kept(self) -> tuple[StepRecord, ...]:
        """Return the steps that are remembered, oldest first."""
        return tuple(self._read(index) for index in range(len(self._steps)))

    def _read(self, index: int) -> StepRecord:
        found = self._steps[index]
        if isinstance(found, _Open):
            found = self._steps[index] = self._closed(found)
        return found

    def _closed(self, opened: _Open) -> StepRecord:
        start, end = self.clock.read([opened.start, opened.end])
        run = opened.run
        return StepRecord(
            step=opened.step,
            start=start,
            end=end,
            actions=() if run is None else tuple(run.events),
            waits=() if run is None else tuple(run.waited.values()),
            transfers=self._timed(opened.transfers),
            entries=opened.entries,
            foreseen=opened.foreseen,
            blocks=self._block_means(opened.blocks),
        )

    def _timed(self, transfers: Sequence[Transfer]) -> tuple[TimedTransfer, ...]:
        marks: list[Any] = []
        for transfer in transfers:
            marks += [transfer.began, transfer.issued]
            marks += [mark for wait in transfer.waits for mark in wait]
        times = iter(self.clock.read(marks))
        timed = []
        for t in transfers:
            exposed = [(next(times), next(times)) for _ in range(1 + len(t.waits))]
            span = exposed[0][0], exposed[-1][1]
            timed.append(
                TimedTransfer(t.axis, t.operation, t.payload, t.sent, *span, tuple(exposed))
            )
        return tuple(timed)

    def _block_means(self, marks: Sequence[tuple[int, Any, Any]]) -> dict[int, float]:
        times = self.clock.read([mark for _, *pair in marks for mark in pair])
        found: dict[int, list[float]] = {}
        for index, (number, *_) in enumerate(marks):
            found.setdefault(number, []).append(times[2 * index + 1] - times[2 * index])
        return {number: sum(all_) / len(all_) for number, all_ in found.items()}


class _BlockWatch:
    """Times the forwards of one block; not those that recompute activations in a backward."""

    def __init__(self, recorder: StepRecorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        self._began: Any = None

    def begin(self, *_: Any) -> None:
        recorder = self._recorder
        forward = recorder._start is not None and not is_in_backward()
        self._began = recorder.clock.mark() if forward else None

    def end(self, *_: Any) -> None:
        if self._began is not None:
            mark = self._recorder.clock.mark()
            self._recorder._blocks.append((self._number, self._began, mark))
            self._began = None
