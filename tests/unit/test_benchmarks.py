"""What the GPU benchmarks read from a trace of torch.profiler."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, ProfilerActivity

SOURCE = Path(__file__).parents[2] / "benchmarks/_trace.py"
SPEC = importlib.util.spec_from_file_location("_trace", SOURCE)
assert SPEC is not None
assert SPEC.loader is not None
_trace: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(_trace)

ON_DEVICE = [  # category, name, start, microseconds: three streams side by side
    ("kernel", "ampere_bf16_gemm", 100, 40),
    ("kernel", "flash_fwd_kernel", 130, 50),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 170, 30),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 240, 10),
    ("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 90, 40),
    ("gpu_memset", "Memset (Device)", 300, 5),
    ("gpu_user_annotation", "forward", 0, 1000),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace as torch writes it, of the CPU."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ones(3, 5) @ torch.ones(5, 2)
    path = tmp_path / "trace.json"
    seen.export_chrome_trace(str(path))
    return path


def test_messages_and_copies_are_split_into_those_beside_computation_and_others(
    recorded: Path,
) -> None:
    trace = json.loads(recorded.read_text())
    assert any(event.get("cat") == "cpu_op" for event in trace["traceEvents"])
    for category, name, start, length in ON_DEVICE:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}
        trace["traceEvents"].append({**event, "pid": 0, "tid": 7, "args": {"stream": 7}})
    recorded.write_text(json.dumps(trace))
    found = _trace.read_trace(recorded)
    # Computation: 100..180, 240..250 and 300..305.
    assert found == _trace.DeviceTime(
        computing=95, copying=30, copying_beside=10, sending=40, sending_beside=30, spanned=215
    )
    assert str(found) == (
        "computing 0.1 of 0.2 ms; copies to and from the host 0.0 ms, 33% beside it; messages "
        "0.0 ms, 75% beside it"
    )


def test_a_trace_without_a_device_has_no_times(recorded: Path) -> None:
    found = _trace.read_trace(recorded)
    assert found.spanned == found.computing == found.copying == found.sending == 0
    assert str(found) == "nothing ran on a device"
