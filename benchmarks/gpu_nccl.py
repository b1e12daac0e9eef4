"""Bus bandwidth of NCCL's collectives over the devices of this machine; with one, that they work.

As nccl-tests counts it: the bytes of the whole tensor over the time, times what a link carries of
them: ``(n - 1) / n`` for all-gather and reduce-scatter, twice that for all-reduce.
"""

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the device."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def measure(rank: int, devices: int, store: str, megabytes: int, repeats: int) -> None:
    """Measure on one device; rank 0 prints."""
    warnings.simplefilter("ignore")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, devices), rank=rank, world_size=devices
    )
    shard = torch.ones(
        max(1, megabytes * 2**20 // 2 // devices), device="cuda", dtype=torch.bfloat16
    )
    whole = torch.ones(len(shard) * devices, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, shard), 1),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(shard, whole), 1),
        "all_reduce": (lambda: dist.all_reduce(whole), 2),
    }
    for name, (call, passes) in calls.items():
        for _ in range(3):
            call()
        time = seconds(call, repeats)
        size = whole.numel() * whole.element_size()
        rate = size / time * passes * (devices - 1) / devices / 1e9
        if rank == 0:
            text = f"{rate:8.1f} GB/s on the bus" if devices > 1 else "one device: no bus"
            print(f"{name:<16}{size / 2**20:8.0f} MiB{time * 1e3:10.3f} ms  {text}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure on all of them, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--megabytes", type=int, default=256, help="of the whole tensor")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.devices:
        print(f"{torch.cuda.device_count()} CUDA devices, not {options.devices}")
        sys.exit(1)
    with tempfile.TemporaryDirectory() as folder:
        given = (options.devices, f"{folder}/store", options.megabytes, options.repeats)
        mp.spawn(measure, given, options.devices)


if __name__ == "__main__":
    main()
