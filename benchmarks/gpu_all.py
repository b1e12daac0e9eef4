"""Everything that is to be seen on a GPU, by one command: `make bench-gpu`, 20 minutes at most.

Each part runs in a process of its own with a time limit, whether or not others fail. A table of
the results, with the device, the versions and what the machine lacks, is added to RESULTS.md.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, UTC
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
LINES = 40
"""That are kept of what a part prints, the last ones."""
OPTIONAL = {
    "deepspeed": "its offloading beside ours",
    "flash_attn": "its kernel in the ring",
    "flash_attn_interface": "FlashAttention 3 in the ring",
    "liger_kernel": "fused cross-entropy, norms and activations",
    "torchao": "float8 and MXFP8",
    "transformer_engine": "its float8",
    "triton": "compiled blocks",
    "pytest": "tests/gpu",
}
"""Package -> what is not seen without it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing to run.

    Attributes:
        name: In the table.
        command: Arguments of Python.
        small: More of them, for a dry run.
        seconds: When it is ended.
        devices: How many it needs.
        variables: Of its environment.
    """

    name: str
    command: Sequence[str]
    small: Sequence[str]
    seconds: int
    devices: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


RANKS = ("test_parity.py", "context/test_parity.py", "offload/test_parity.py")
"""Tests of several ranks, which share the device; see tests/support/one_gpu.py."""
SHORT = ("--pairs", "2", "--steps", "1", "--warmup", "1")


def parts(devices: int) -> Iterator[Part]:
    """Give what there is to run; 1,150 seconds at most on one device."""
    folder = "benchmarks"
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
    yield Part(
        name="tests/gpu",
        command=(*tests, "tests/gpu"),
        small=("-x",),
        seconds=120,
    )
    yield Part(
        name="ranks on one device, NCCL",
        command=(*tests, "-n", "4", *(f"tests/distributed/{name}" for name in RANKS)),
        small=("-k", "cp2"),
        seconds=240,
        variables={"RANKS_ON_GPU": "nccl"},
    )
    yield Part(
        name="tokens per second, MFU",
        command=(f"{folder}/gpu_tokens_per_second.py", "--pairs", "7"),
        small=("--tiny", "--no-compile", *SHORT),
        seconds=300,
    )
    yield Part(
        name="offloading",
        command=(f"{folder}/gpu_offload.py", "--pairs", "3", "--steps", "2", "--most", "16"),
        small=("--tiny", "--batch", "2", "--most", "1", *SHORT),
        seconds=240,
    )
    yield Part(
        name="ring kernels",
        command=(f"{folder}/gpu_ring_overhead.py",),
        small=("--tokens", "16", "--members", "2", "--pairs", "2"),
        seconds=100,
    )
    yield Part(
        name="memory, staging of checkpoints",
        command=(f"{folder}/gpu_memory.py",),
        small=("--tiny",),
        seconds=110,
    )
    for count in sorted({1, devices}):
        yield Part(
            name=f"NCCL, {count} device{'s' if count > 1 else ''}",
            command=(f"{folder}/gpu_nccl.py", "--devices", str(count)),
            small=("--megabytes", "1", "--repeats", "2"),
            seconds=50,
            devices=count,
        )


def missing(devices: int) -> Iterator[str]:
    """Give what this machine lacks, and what is therefore not seen."""
    if torch.cuda.device_count() < max(devices, 2):
        yield f"{torch.cuda.device_count()} CUDA device(s): no bandwidth between several"
    for package, what in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            yield f"no {package}: {what}"


def run(part: Part, *, small: bool) -> tuple[str, float, str]:
    """Run a part; return its result, its seconds, and the end of what it printed."""
    if torch.cuda.device_count() < part.devices:
        return f"not run: {torch.cuda.device_count()} of {part.devices} devices", 0.0, ""
    command = [sys.executable, *part.command, *(part.small if small else ())]
    limit = part.seconds * (4 if small else 1)  # the machine of a dry run may be slow
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={
            **os.environ,
            **part.variables,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        },
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit)
            code = process.returncode
            result = "done" if code == 0 else f"**failed**, exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"**ended** after its {limit} s"
            _end(process)
            text, _ = process.communicate()
        finally:
            _end(process)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return result, time.monotonic() - began, "\n".join(lines[-LINES:])


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill a part and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def head(command: str, devices: int) -> Iterator[str]:
    """Give the first lines of the report."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning")]
    if torch.cuda.is_available():
        versions.append(f"CUDA {torch.version.cuda}")
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        device = "no CUDA device: nothing was run"
    yield f"## On GPUs, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield f"`{command}`: {device}, {', '.join(versions)}."
    yield "\n".join(["Missing on that machine:", "", *(f"- {m}" for m in missing(devices))])


def main() -> None:
    """Run all parts, and add the report to RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--small", action="store_true", help="tiny sizes, to find errors")
    parser.add_argument("--only", help="parts whose name contains this")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/RESULTS.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and end the part
    report = list(head(shlex.join(["python", *sys.argv]), options.devices))
    print("\n\n".join(report), flush=True)
    rows, texts, failed = ["| part | result | seconds |", "|---|---|---|"], [], False
    for part in parts(options.devices) if torch.cuda.is_available() else ():
        if options.only and options.only not in part.name:
            continue
        result, seconds, text = run(part, small=options.small)
        failed = failed or "**" in result
        rows.append(f"| {part.name} | {result} | {seconds:.0f} |")
        texts.append(f"{part.name}: `python {shlex.join(part.command)}`\n\n```\n{text}\n```")
        print(f"{rows[-1]}\n{text}", flush=True)
    if texts:
        with options.results.open("a") as file:
            file.write("\n" + "\n\n".join([*report, "\n".join(rows), *texts]) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
