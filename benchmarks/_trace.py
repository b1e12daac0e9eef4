"""Reads traces of torch.profiler: how much of copies and messages ran beside computation."""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile, ProfilerActivity, supported_activities

__all__ = ["DeviceTime", "read_trace", "trace_device"]

Spans = list[tuple[float, float]]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a device, in the format of `export_chrome_trace`."""


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Microseconds on one device; what runs on several streams at once counts once.

    Attributes:
        computing: Of kernels, and of copies inside the device.
        copying: Of copies between host and device.
        copying_beside: Those while something was computed.
        sending: Of NCCL's kernels, and of copies between devices.
        sending_beside: Those while something was computed.
        spanned: From the first start to the last end.
    """

    computing: float
    copying: float
    copying_beside: float
    sending: float
    sending_beside: float
    spanned: float

    def __str__(self) -> str:
        if not self.spanned:
            return "nothing ran on a device"
        texts = [f"computing {self.computing / 1e3:.1f} of {self.spanned / 1e3:.1f} ms"]
        for name, time, beside in (
            ("copies to and from the host", self.copying, self.copying_beside),
            ("messages", self.sending, self.sending_beside),
        ):
            if time:
                texts.append(f"{name} {time / 1e3:.1f} ms, {beside / time:.0%} beside it")
        return "; ".join(texts)


def trace_device(run: Callable[[], object]) -> DeviceTime | None:
    """Return what ran on this process's device meanwhile; None: torch records no device.

    Args:
        run: Is called once.
    """
    if ProfilerActivity.CUDA not in supported_activities():
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> DeviceTime:
    """Read a file of `torch.profiler.profile.export_chrome_trace`, of one process."""
    kinds: dict[str, Spans] = {"compute": [], "copy": [], "message": []}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE:
            start = float(event["ts"])
            kinds[_kind(event["name"])].append((start, start + float(event["dur"])))
    merged = {kind: _merge(spans) for kind, spans in kinds.items()}
    every = _merge(span for spans in kinds.values() for span in spans)
    return DeviceTime(
        computing=_length(merged["compute"]),
        copying=_length(merged["copy"]),
        copying_beside=_shared(merged["copy"], merged["compute"]),
        sending=_length(merged["message"]),
        sending_beside=_shared(merged["message"], merged["compute"]),
        spanned=every[-1][1] - every[0][0] if every else 0,
    )


def _kind(name: str) -> str:
    if "nccl" in name.lower() or "PtoP" in name:
        return "message"
    return "copy" if "Memcpy" in name and "DtoD" not in name else "compute"


def _merge(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return disjoint spans in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _shared(one: Spans, two: Spans) -> float:
    overlaps = (min(b, d) - max(a, c) for a, b in one for c, d in two)
    return sum(overlap for overlap in overlaps if overlap > 0)
