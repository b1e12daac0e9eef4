"""Timed records of the training steps of a rank: pipeline actions, waits, communication, blocks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
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
    """One collective, send or receive; times in seconds on the clock of its record.

    Args:
        axis: Mesh axis, or the name of the group.
        operation: As in the table of `comm_volume.py`.
        payload: Bytes of the unsharded tensor.
        sent: Bytes that the rank sent.
        start: Time of the call.
        end: Time at which the wait for its result ended; without a wait, at which the call
            returned.
        exposed: Start and end of every interval in which the rank was blocked by it.
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
        """Total time in which the rank was blocked, in seconds."""
        return sum(end - start for start, end in self.exposed)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step of one rank; all times are seconds on one clock.

    Attributes:
        step: Number of the batch.
        start: Start of the batch.
        end: End of the batch, optimizer step included.
        actions: Pipeline actions in the order in which they ran; empty without a pipeline.
        waits: Seconds for which each action waited for its input; as long as `actions`.
        transfers: Communication in the order of the calls.
        entries: Communication volume that was counted.
        expected: Communication volume that follows from the plan; lacks some axes and operations.
        blocks: Index of a block -> seconds of its forward, the median over the micro-batches.
    """

    step: int
    start: float
    end: float
    actions: tuple[TimedAction, ...]
    waits: tuple[float, ...]
    transfers: tuple[TimedTransfer, ...]
    entries: tuple[CommVolumeEntry, ...]
    expected: tuple[CommVolumeEntry, ...]
    blocks: Mapping[int, float]

    def shifted(self, seconds: float) -> "StepRecord":
        """Return the same step with all times moved onto another clock.

        Args:
            seconds: Time of the other clock minus time of this one.
        """
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
    """The last recorded steps of one rank, on the clock of rank 0.

    Attributes:
        rank: Global rank.
        place: Mesh axis -> coordinate of this rank, for the axes larger than 1.
        steps: Records, oldest first.
        clock_error: Bound of the error of the times against rank 0, in seconds.
    """

    rank: int
    place: Mapping[str, int]
    steps: tuple[StepRecord, ...]
    clock_error: float

    @property
    def name(self) -> str:
        """Name in reports, such as ``rank 5 (pp 1, tp 1)``."""
        place = ", ".join(f"{axis} {at}" for axis, at in self.place.items())
        return f"rank {self.rank} ({place})" if place else f"rank {self.rank}"


@dataclass(eq=False, kw_only=True)
class _UnreadStep:
    """A step whose time marks have not been converted to seconds yet."""

    step: int
    start: Any
    end: Any
    run: PipelineRun | None
    transfers: list[Transfer]
    entries: tuple[CommVolumeEntry, ...]
    expected: tuple[CommVolumeEntry, ...]
    blocks: list[tuple[int, Any, Any]]


@dataclass(eq=False, kw_only=True)
class StepRecorder:
    """Recorder of the last steps of one rank.

    Time marks are converted to seconds when a step is asked for: on CUDA a mark is an event, and
    reading it synchronizes with the GPU.

    Args:
        clock: Clock that takes the time marks.
        comm_volume: Counter of the communication, with the same clock.
        blocks: Index of a block in the model -> the block, for the blocks on this rank.
        keep: Number of steps that are kept.
    """

    clock: Clock
    comm_volume: CommVolume
    blocks: Mapping[int, nn.Module]
    keep: int
    _steps: list[_UnreadStep | StepRecord] = field(default_factory=list)
    _start: Any = None
    _blocks: list[tuple[int, Any, Any]] = field(default_factory=list)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook collectives and block forwards; steps inside the context can be recorded."""
        handles = []
        # The order of hooks does not matter: each takes marks only.
        for number, block in self.blocks.items():
            timer = _BlockTimer(self, number)
            handles.append(block.register_forward_pre_hook(timer.begin))
            handles.append(block.register_forward_hook(timer.end))
        # Only between begin() and end(): validation and checkpoints are no part of a step.
        self.comm_volume.enabled = False
        try:
            with self.comm_volume:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Start to record a step."""
        self.comm_volume.clear()
        self._blocks = []
        self.comm_volume.enabled = True
        self._start = self.clock.mark()

    def end(
        self, step: int, run: PipelineRun | None, expected: tuple[CommVolumeEntry, ...] = ()
    ) -> None:
        """End the step and keep its record.

        Args:
            step: Number of the batch.
            run: Actions of the pipeline schedule as they ran; None without a pipeline.
            expected: Communication volume that follows from the plan.
        """
        self.comm_volume.enabled = False
        unread = _UnreadStep(
            step=step,
            start=self._start,
            # After counting has stopped, before anything else is done.
            end=self.clock.mark(),
            run=run,
            transfers=self.comm_volume.transfers,
            entries=self.comm_volume.entries(),
            expected=expected,
            blocks=self._blocks,
        )
        self._start = None
        # A new list: `kept` of an earlier call stays as it was.
        self._steps = [*self._steps, unread][-self.keep :]

    def last(self) -> StepRecord:
        """Return the record of the last step."""
        return self._record(len(self._steps) - 1)

    def kept(self) -> tuple[StepRecord, ...]:
        """Return the records of the last `keep` steps, oldest first."""
        return tuple(self._record(index) for index in range(len(self._steps)))

    def _record(self, index: int) -> StepRecord:
        found = self._steps[index]
        if isinstance(found, _UnreadStep):
            found = self._steps[index] = self._read(found)
        return found

    def _read(self, unread: _UnreadStep) -> StepRecord:
        start, end = self.clock.read([unread.start, unread.end])
        run = unread.run
        return StepRecord(
            step=unread.step,
            start=start,
            end=end,
            actions=() if run is None else tuple(run.events),
            waits=() if run is None else tuple(run.waited.values()),
            transfers=self._timed(unread.transfers),
            entries=unread.entries,
            expected=unread.expected,
            blocks=self._block_medians(unread.blocks),
        )

    def _timed(self, transfers: Sequence[Transfer]) -> tuple[TimedTransfer, ...]:
        # All marks in one read: each read may synchronize with the GPU.
        marks: list[Any] = []
        for transfer in transfers:
            marks += [transfer.began, transfer.issued]
            marks += [mark for wait in transfer.waits for mark in wait]
        times = iter(self.clock.read(marks))
        timed = []
        for t in transfers:
            # The call itself blocks the rank as well, hence 1 +.
            exposed = [(next(times), next(times)) for _ in range(1 + len(t.waits))]
            span = exposed[0][0], exposed[-1][1]
            timed.append(
                TimedTransfer(t.axis, t.operation, t.payload, t.sent, *span, tuple(exposed))
            )
        return tuple(timed)

    def _block_medians(self, marks: Sequence[tuple[int, Any, Any]]) -> dict[int, float]:
        times = self.clock.read([mark for _, *pair in marks for mark in pair])
        found: dict[int, list[float]] = {}
        for index, (number, *_) in enumerate(marks):
            # Two times for each pair of marks.
            found.setdefault(number, []).append(times[2 * index + 1] - times[2 * index])
        # As of the actions: a call that is interrupted once does not make its block a slow one.
        return {number: median(all_) for number, all_ in found.items()}


class _BlockTimer:
    """Timer of the forwards of one block, without the recomputation of activation checkpointing."""

    def __init__(self, recorder: StepRecorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        self._began: Any = None

    def begin(self, *_: Any) -> None:
        recorder = self._recorder
        # -1: not inside a backward, so this is no recomputation.
        forward = recorder._start is not None and not is_in_backward()
        self._began = recorder.clock.mark() if forward else None

    def end(self, *_: Any) -> None:
        if self._began is not None:
            mark = self._recorder.clock.mark()
            self._recorder._blocks.append((self._number, self._began, mark))
            self._began = None
