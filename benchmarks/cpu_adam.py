"""One Adam step on the host, bfloat16 gradient in and bfloat16 parameter out, against the floor.

The floor reads four float32 streams and writes three, 28 bytes an entry, and computes next to
nothing. All contenders take turns in one process; a round is one step of each; each writes the
parameter over the gradient, and owns all memory that it needs. DeepSpeedCPUAdam
takes part where it is installed; it compiles for minutes when it is first used. Give several
threads their own cores: OMP_NUM_THREADS is set here.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p, CDLL
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLOOR = """
#include <stdint.h>
extern "C" void sweep(float* __restrict p, float* __restrict m, float* __restrict v,
                      const float* __restrict g, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) { float x = g[i]; p[i] += x; m[i] += x; v[i] += x; }
}
"""


def host_step(name: str, entries: int, threads: int, folder: Path) -> Callable[[], None]:
    """Return the step of one of this package's kernels."""
    import torch

    from lightning_par.engine.offload.adam import AdamRule, AdamTensors
    from lightning_par.engine.offload.cpu_kernels import choose_kernel
    from lightning_par.engine.offload.update_worker import Update, UpdateWorker

    rule = AdamRule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
    worker = UpdateWorker(choose_kernel(name, folder), threads)
    slot = torch.randn(entries).bfloat16()
    tensors = AdamTensors(
        master=torch.randn(entries),
        mean=torch.zeros(entries),
        square=torch.zeros(entries),
        grad=slot,
        out=slot,
    )
    update = Update(rule=rule, tensors=tensors, step=3)
    return lambda: worker.submit(torch.cpu.Event(), [update], 1.0, float("inf")).result()


def cast_step(make: Callable[[Any], Any], entries: int) -> Callable[[], None]:
    """Return the step of an optimizer in float32, with what it takes to come there and back."""
    import torch

    parameter = torch.nn.Parameter(torch.randn(entries))
    optimizer, wide = make([parameter]), torch.empty(entries)
    slot = torch.randn(entries).bfloat16()

    def run() -> None:
        wide.copy_(slot)
        parameter.grad = wide
        optimizer.step()
        slot.copy_(parameter.data)

    return run


def floor_step(entries: int, threads: int, folder: Path) -> Callable[[], None]:
    """Return a sweep over as much memory."""
    import torch

    from lightning_par.engine.offload.cpp_build import build_library

    source = folder / "floor.cpp"
    source.write_text(FLOOR)
    sweep = CDLL(str(build_library(source, folder))).sweep
    sweep.argtypes = [c_void_p] * 4 + [c_int64]
    streams, pool = [torch.randn(entries) for _ in range(4)], ThreadPoolExecutor(threads)
    size = -(-entries // (threads * 64)) * 64
    parts = [(low, min(size, entries - low)) for low in range(0, entries, size)]

    def run() -> None:
        list(pool.map(lambda p: sweep(*(s.data_ptr() + 4 * p[0] for s in streams), p[1]), parts))

    return run


def contenders(entries: int, threads: int, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the step of each, all with their own tensors."""
    import torch

    torch.set_num_threads(threads)
    found = {
        "floor": floor_step(entries, threads, folder),
        "native": host_step("native", entries, threads, folder),
        "torch, tiled": host_step("torch", entries, threads, folder),
        "casts + torch fused": cast_step(lambda p: torch.optim.AdamW(p, fused=True), entries),
    }
    if find_spec("deepspeed") is not None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["casts + DeepSpeedCPUAdam"] = cast_step(
            lambda p: DeepSpeedCPUAdam(p, weight_decay=0.01), entries
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=2**26)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):  # read when torch is imported
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        steps = contenders(options.entries, options.threads, Path(folder))
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(options.rounds + 2):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                if number >= 2:
                    times[name].append(time.perf_counter() - began)
    print(f"{options.entries:,} entries, {options.threads} threads, {options.rounds} rounds")
    for name, row in times.items():
        print(
            f"{name:<26}{statistics.median(row) * 1e3:9.1f} ms   "
            f"{paired(row, times['floor'])} x the floor   {paired(row, times['native'])} x native"
        )


def paired(times: list[float], others: list[float]) -> str:
    """Return the median and the quartiles of the ratios within a round."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f}..{ratios[-1 - quarter]:.2f})"


if __name__ == "__main__":
    main()
