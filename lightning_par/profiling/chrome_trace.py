"""Export of recorded steps in the Trace Event Format, for Perfetto and ``chrome://tracing``.

Every rank is a process with these tracks: its steps, its pipeline actions, and one track per mesh
axis that shows each communication in flight and, inside it, the time for which it blocked the rank.
Arrows lead from an action to the one on another rank that needs its result.

**Source**: Trace Event Format, Google, "JSON Object Format"; times are microseconds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_par.engine.pipeline.actions import ActionKind, TimedAction
from lightning_par.profiling.pipeline_record import RankRecord, StepRecord, TimedTransfer

__all__ = ["trace_events", "write_trace"]

_Event = dict[str, Any]
_STEPS, _ACTIONS = 0, 1
_NAMES: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward, input",
    ActionKind.BACKWARD_WEIGHT: "backward, weights",
}


def write_trace(records: Sequence[RankRecord], path: Path) -> Path:
    """Write a trace file.

    Args:
        records: Records of every rank, on one clock.
        path: File to write; its folder exists.

    Returns:
        `path`.
    """
    document = {"traceEvents": list(trace_events(records)), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document))
    return path


def trace_events(records: Sequence[RankRecord]) -> Iterator[_Event]:
    """Yield the events of a trace, ready for JSON.

    Args:
        records: Records of every rank, on one clock.
    """
    starts = [step.start for record in records for step in record.steps]
    # Times begin with the first step of any rank: microseconds since boot would lose digits.
    origin = min(starts, default=0.0)
    for record in records:
        tracks = _tracks(record)
        yield _metadata("process_name", record.rank, 0, record.name)
        # By name, rank 10 would come before rank 2.
        yield {
            **_metadata("process_sort_index", record.rank, 0, ""),
            "args": {"sort_index": record.rank},
        }
        for name, track in tracks.items():
            yield _metadata("thread_name", record.rank, track, name)
        for step in record.steps:
            yield _complete(f"step {step.step}", "step", record.rank, _STEPS, step, origin, {})
            for action, wait in zip(step.actions, step.waits, strict=True):
                yield _action(action, wait, record.rank, origin)
            for number, transfer in enumerate(step.transfers):
                track = tracks[transfer.axis]
                # Pairs "b" and "e": unique over ranks, as ids are global.
                key = f"{record.rank}.{step.step}.{number}"
                yield from _transfer(transfer, record.rank, track, key, origin)
    yield from _arrows(records, origin)


def _tracks(record: RankRecord) -> dict[str, int]:
    axes = dict.fromkeys(t.axis for step in record.steps for t in step.transfers)
    names = {"step": _STEPS, "pipeline": _ACTIONS}
    return {**names, **{axis: number for number, axis in enumerate(axes, len(names))}}


def _metadata(kind: str, rank: int, track: int, name: str) -> _Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _microseconds(time: float, origin: float) -> float:
    return round((time - origin) * 1e6, 3)


def _complete(
    name: str,
    category: str,
    rank: int,
    track: int,
    span: StepRecord | TimedAction | TimedTransfer,
    origin: float,
    arguments: Mapping[str, Any],
) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": track,
        "ts": _microseconds(span.start, origin),
        "dur": round((span.end - span.start) * 1e6, 3),
        "args": dict(arguments),
    }


def _action(event: TimedAction, wait: float, rank: int, origin: float) -> _Event:
    action = event.action
    about = {"stage": action.stage, "micro-batch": action.microbatch, "waited_ms": wait * 1e3}
    kind = _NAMES[action.kind]
    return _complete(str(action), kind, rank, _ACTIONS, event, origin, about)


def _transfer(
    transfer: TimedTransfer, rank: int, track: int, key: str, origin: float
) -> Iterator[_Event]:
    """Yield the events of one communication: in flight, and the intervals in which it blocked."""
    # Async events ("b", "e") may overlap on a track, complete events ("X") must nest. Several
    # communications are in flight at once, but a rank is blocked by one at a time.
    about = {
        "payload_bytes": transfer.payload,
        "sent_bytes": transfer.sent,
        "exposed_ms": transfer.exposed_seconds * 1e3,
    }
    common = {"name": transfer.operation, "cat": transfer.axis, "pid": rank, "tid": track}
    yield {
        **common,
        "ph": "b",
        "id": key,
        "ts": _microseconds(transfer.start, origin),
        "args": about,
    }
    yield {**common, "ph": "e", "id": key, "ts": _microseconds(transfer.end, origin)}
    for start, end in transfer.exposed:
        yield {
            **common,
            "ph": "X",
            "ts": _microseconds(start, origin),
            "dur": round((end - start) * 1e6, 3),
            "args": about,
        }


def _arrows(records: Sequence[RankRecord], origin: float) -> Iterator[_Event]:
    """Yield an arrow from every action to the one of the neighboring stage that needs its result.

    Stages on the same rank pass tensors without a message, hence no arrow.
    """
    for pipeline in _pipelines(records):
        # Only steps that all ranks of the pipeline have kept.
        for index in range(min(len(record.steps) for record in pipeline)):
            ran = {
                event.action: (record.rank, event)
                for record in pipeline
                for event in record.steps[index].actions
            }
            for action, (rank, event) in ran.items():
                # Activations go to the next stage, gradients to the one before.
                ahead = 1 if action.kind is ActionKind.FORWARD else -1
                kinds = (
                    (action.kind,)
                    if ahead == 1
                    else (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
                )
                if action.kind is ActionKind.BACKWARD_WEIGHT:
                    continue  # weight gradients stay on the rank
                for kind in kinds:
                    # The last stage has nobody ahead, and an action of a split backward has one
                    # of two kinds.
                    following = ran.get(type(action)(action.stage + ahead, kind, action.microbatch))
                    if following is not None and following[0] != rank:
                        key = f"{pipeline[0].rank}.{index}.{action}"
                        yield from _arrow(key, rank, event, *following, origin)


def _arrow(
    key: str, rank: int, event: TimedAction, other: int, needed: TimedAction, origin: float
) -> Iterator[_Event]:
    common = {"name": "message", "cat": "message", "id": key, "tid": _ACTIONS}
    yield {**common, "ph": "s", "pid": rank, "ts": _microseconds(event.end, origin)}
    # "bp": the arrow ends at the enclosing action, not at the next one.
    yield {**common, "ph": "f", "bp": "e", "pid": other, "ts": _microseconds(needed.start, origin)}


def _pipelines(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Group the ranks that differ only in their coordinate on the pp axis."""
    found: dict[tuple[tuple[str, int], ...], list[RankRecord]] = {}
    for record in records:
        rest = tuple((axis, at) for axis, at in record.place.items() if axis != "pp")
        found.setdefault(rest, []).append(record)
    return list(found.values())
