"""`CommunicationProfiler`: what a step communicates, on which axis, and what it has to wait for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_par.callbacks.profiler import Chapter, Profiler, Recording
from lightning_par.profiling.comm_volume import CommVolumeEntry
from lightning_par.profiling.html_report import Table
from lightning_par.profiling.pipeline_record import RankRecord, StepRecord

__all__ = ["CommunicationProfiler"]

_NOTE = (
    "One step, all ranks together; times are the mean over the ranks that took part. Sent: what "
    "the ranks send with the ring algorithm. Predicted: what the plan and the shapes say; empty "
    "where they do not. Time runs from the call to the end of the wait for its result. Exposed: a "
    "rank stood still for it. Hidden: it went on computing. What is under way at once is added up."
)


@dataclass(eq=False)
class _Row:
    """One axis and operation, all ranks together."""

    calls: int = 0
    payload: int = 0
    sent: float = 0
    predicted: float | None = None
    ranks: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def time(self) -> float:
        """Seconds, the mean over the ranks that took part."""
        return self.seconds / max(self.ranks, 1)

    @property
    def mean_exposed(self) -> float:
        """Seconds, the mean over the ranks that took part."""
        return self.exposed / max(self.ranks, 1)


class CommunicationProfiler(Profiler):
    """Keeps a ledger of every collective and every message, per mesh axis and operation.

    Logged at the Trainer's ``log_every_n_steps``, for the last step, the same on every rank; axis
    and operation are such as ``tp/all_gather`` or ``pp_activations/send``:

    ===========================================  =====  ==========================================
    key                                          unit   meaning
    ===========================================  =====  ==========================================
    ``communication/axis/operation/calls``       1      of all ranks together
    ``communication/axis/operation/sent``        bytes  of all ranks together, by the ring
    ``communication/axis/operation/predicted``   bytes  the same, from the plan; where it can be
    ``communication/axis/operation/time``        ms     from the call to the end of the wait, the
                                                        mean over the ranks that took part
    ``communication/axis/operation/exposed``     ms     of this, how long a rank stood still
    ===========================================  =====  ==========================================

    The report of `PipelineProfiler` has the same as a table, and the timeline shows when a rank
    stood still for what; without that callback this one writes both.

    Args:
        folder: Where the files go; None: ``profile`` in the folder of the Trainer's logger.
        keep_steps: How many steps, the last ones, are shown in the files.

    **Communicates**: at every logged step, one small object of every rank to all.
    """

    @override
    def measure(self, recording: Recording) -> Mapping[str, float]:
        mine = _row_parts(recording.steps.last())
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        values = {}
        for (axis, operation), row in _join(found).items():
            key = f"communication/{axis.replace(' ', '_')}/{operation}"
            values[f"{key}/calls"] = float(row.calls)
            values[f"{key}/sent"] = float(row.sent)
            values[f"{key}/time"] = 1e3 * row.time
            values[f"{key}/exposed"] = 1e3 * row.mean_exposed
            if row.predicted is not None:
                values[f"{key}/predicted"] = float(row.predicted)
        return values

    @override
    def describe(self, recording: Recording, records: Sequence[RankRecord]) -> Chapter:
        rows = _join(_row_parts(record.steps[-1]) for record in records)
        chapter = Chapter()
        sent, exposed = sum(r.sent for r in rows.values()), sum(r.exposed for r in rows.values())
        chapter.headline = {
            "sent by all ranks in a step": f"{sent / 2**20:,.2f} MiB",
            "stood still for communication, per rank": f"{1e3 * exposed / len(records):,.2f} ms",
        }
        chapter.tables = [
            Table(
                key="communication",
                title="Communication",
                note=_NOTE,
                columns=(
                    "axis",
                    "operation",
                    "calls",
                    "payload, bytes",
                    "sent, bytes",
                    "predicted, bytes",
                    "time, ms",
                    "exposed, ms",
                    "hidden, ms",
                ),
                rows=[_cells(*key, row) for key, row in rows.items()],
            )
        ]
        return chapter


_Parts = dict[tuple[str, str], tuple[CommVolumeEntry | None, CommVolumeEntry | None, float, float]]


def _row_parts(step: StepRecord) -> _Parts:
    """Return, of one rank, what was counted, what was foreseen, seconds, and seconds exposed."""
    counted = {(e.axis, e.operation): e for e in step.entries}
    foreseen = {(e.axis, e.operation): e for e in step.foreseen}
    times: dict[tuple[str, str], tuple[float, float]] = {}
    for t in step.transfers:
        key = t.axis, t.operation
        seconds, exposed = times.get(key, (0.0, 0.0))
        times[key] = seconds + t.end - t.start, exposed + t.exposed_seconds
    keys = dict.fromkeys((*counted, *foreseen))
    return {k: (counted.get(k), foreseen.get(k), *times.get(k, (0.0, 0.0))) for k in keys}


def _join(parts: Iterable[_Parts]) -> dict[tuple[str, str], _Row]:
    """Add up what all ranks give."""
    rows: dict[tuple[str, str], _Row] = {}
    for part in parts:
        for key, (counted, foreseen, seconds, exposed) in part.items():
            row = rows.setdefault(key, _Row())
            if counted is not None:
                row.calls += counted.calls
                row.payload += counted.payload
                row.sent += counted.sent
                row.ranks += 1
            if foreseen is not None:
                row.predicted = (row.predicted or 0) + foreseen.sent
            row.seconds += seconds
            row.exposed += exposed
    return dict(sorted(rows.items()))


def _cells(axis: str, operation: str, row: _Row) -> tuple[str, ...]:
    return (
        axis,
        operation,
        f"{row.calls:,}",
        f"{row.payload:,}",
        f"{row.sent:,.0f}",
        "" if row.predicted is None else f"{row.predicted:,.0f}",
        f"{1e3 * row.time:.3f}",
        f"{1e3 * row.mean_exposed:.3f}",
        f"{1e3 * (row.time - row.mean_exposed):.3f}",
    )
