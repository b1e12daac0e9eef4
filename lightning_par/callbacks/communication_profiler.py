"""`CommunicationProfiler`: volume and exposed time of a step's communication, per mesh axis."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_par.callbacks.profiler import Profiler, Recording, ReportSection
from lightning_par.profiling.comm_volume import CommVolumeEntry
from lightning_par.profiling.html_report import Table
from lightning_par.profiling.pipeline_record import RankRecord, StepRecord

__all__ = ["CommunicationProfiler"]

_NOTE = (
    "One step, all ranks together. Times are the mean over the ranks that took part. Sent: the "
    "bytes that the ranks send with the ring algorithm. Predicted: the bytes by the plan and the "
    "shapes; empty if there is no prediction. Time: from the call to the end of the wait for the "
    "result. Exposed: the part in which a rank was blocked. Hidden: the rest. Times of transfers "
    "that overlap are added, so that their sum may be longer than a step."
)


@dataclass(eq=False)
class _Row:
    """Communication on one axis in one operation, summed over all ranks."""

    calls: int = 0
    payload: int = 0
    sent: float = 0
    predicted: float | None = None
    ranks: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def time(self) -> float:
        """Seconds from the calls to the ends of their waits, mean over participating ranks."""
        return self.seconds / max(self.ranks, 1)

    @property
    def mean_exposed(self) -> float:
        """Seconds of `time` in which a rank was blocked, mean over participating ranks."""
        return self.exposed / max(self.ranks, 1)


class CommunicationProfiler(Profiler):
    """Profiler of every collective and point-to-point message, per mesh axis and operation.

    Logged at the Trainer's ``log_every_n_steps``, for the last step, the same on every rank; axis
    and operation are such as ``tp/all_gather`` or ``pp_activations/send``:

    - ``communication/axis/operation/calls``: number of calls, summed over all ranks
    - ``communication/axis/operation/sent`` (bytes): sent under the ring algorithm, summed over all
      ranks
    - ``communication/axis/operation/predicted`` (bytes): the same, computed from the plan; absent
      where the plan does not determine it
    - ``communication/axis/operation/time`` (ms): from the call to the end of the wait, mean over
      the participating ranks
    - ``communication/axis/operation/exposed`` (ms): part of ``time`` in which the rank was blocked

    The report of `PipelineProfiler` has the same as a table, and its timeline shows which
    communication blocked which rank; without that callback this one writes both.

    Args:
        folder: Folder of the files; None: ``profile`` in the folder of the Trainer's logger.
        keep_steps: Number of steps, counted from the last, that the files show; 1 or more.

    What a step did not communicate is logged as 0 once an earlier step did: the first steps send
    more, to prove themselves and to agree on shapes.

    **Communicates**: at every logged step, an all-gather of one small object per rank.

    Examples:
        >>> trainer = L.Trainer(callbacks=[CommunicationProfiler(keep_steps=5)])
    """

    _logged: frozenset[str] = frozenset()

    @override
    def measure(self, recording: Recording) -> Mapping[str, float]:
        # All ranks, since ranks of different stages use different axes and operations.
        mine = _rank_parts(recording.steps.last())
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        # A value that is not logged anew would stay in the logger's next rows.
        values = dict.fromkeys(self._logged, 0.0)
        for (axis, operation), row in _join(found).items():
            # Such as "pp shared weights", the group of a tied weight.
            key = f"communication/{axis.replace(' ', '_')}/{operation}"
            values[f"{key}/calls"] = float(row.calls)
            values[f"{key}/sent"] = float(row.sent)
            values[f"{key}/time"] = 1e3 * row.time
            values[f"{key}/exposed"] = 1e3 * row.mean_exposed
            if row.predicted is not None:
                values[f"{key}/predicted"] = float(row.predicted)
        self._logged = frozenset(values)
        return values

    @override
    def describe(self, recording: Recording, records: Sequence[RankRecord]) -> ReportSection:
        rows = _join(_rank_parts(record.steps[-1]) for record in records)
        section = ReportSection()
        sent, exposed = sum(r.sent for r in rows.values()), sum(r.exposed for r in rows.values())
        section.headline = {
            "sent by all ranks in a step": f"{sent / 2**20:,.2f} MiB",
            "blocked by communication, per rank": f"{1e3 * exposed / len(records):,.2f} ms",
        }
        section.tables = [
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
        return section


_Parts = dict[tuple[str, str], tuple[CommVolumeEntry | None, CommVolumeEntry | None, float, float]]


def _rank_parts(step: StepRecord) -> _Parts:
    """Return one rank's part of every row.

    Returns:
        (axis, operation) -> counted volume, expected volume, seconds, exposed seconds.
    """
    counted = {(e.axis, e.operation): e for e in step.entries}
    expected = {(e.axis, e.operation): e for e in step.expected}
    times: dict[tuple[str, str], tuple[float, float]] = {}
    for t in step.transfers:
        key = t.axis, t.operation
        seconds, exposed = times.get(key, (0.0, 0.0))
        times[key] = seconds + t.end - t.start, exposed + t.exposed_seconds
    keys = dict.fromkeys((*counted, *expected))
    return {k: (counted.get(k), expected.get(k), *times.get(k, (0.0, 0.0))) for k in keys}


def _join(parts: Iterable[_Parts]) -> dict[tuple[str, str], _Row]:
    """Sum the rows over all ranks."""
    rows: dict[tuple[str, str], _Row] = {}
    for part in parts:
        for key, (counted, expected, seconds, exposed) in part.items():
            row = rows.setdefault(key, _Row())
            # A rank without such calls (of another stage) must not lower the mean.
            if counted is not None:
                row.calls += counted.calls
                row.payload += counted.payload
                row.sent += counted.sent
                row.ranks += 1
            if expected is not None:
                row.predicted = (row.predicted or 0) + expected.sent
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
