"""Start and memory of 4 ranks whose loaders have 4 workers each, here and in another checkout.

    git worktree add ../before COMMIT && python benchmarks/loader_workers.py ../before

Two tensor-parallel ranks times two replicas train on the same random tokens. The start is the time
from the call of `fit` to the end of the first step; the memory is the proportional set size (PSS)
of all ranks and workers in step 5, in which pages that several processes share count once.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "zero_stage": 1}


def tree_bytes(pid: int) -> int:
    """Return the PSS in bytes of a process and of all its descendants."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = next(int(x.split()[1]) for x in rollup.splitlines() if x.startswith("Pss:")) * 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(tree_bytes(int(child)) for child in children)


def train(workers: int) -> None:
    """Train five steps, and say the seconds of the start and the bytes of all processes."""
    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lightning_par import Hybrid3DStrategy
    from lightning_par.models import GPTModule

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.strategy.barrier()
            if trainer.global_rank == 0 and trainer.global_step == 1:
                print("start", time.perf_counter() - began, flush=True)
            if trainer.global_rank == 0 and trainer.global_step == 5:
                print("bytes", tree_bytes(os.getpid()), flush=True)
            trainer.strategy.barrier()

    torch.manual_seed(0)
    rows = torch.randint(2048, (256, 129))
    data: Any = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=Hybrid3DStrategy(**LAYOUT),
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    sizes = {"vocab_size": 2048, "model_dim": 256, "num_heads": 8, "num_kv_heads": 4}
    began = time.perf_counter()
    trainer.fit(GPTModule(overrides=sizes), DataLoader(data, 4, num_workers=workers))


def measure(checkout: Path, workers: int) -> tuple[float, float]:
    """Return seconds and MiB of one run of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(
        [sys.executable, __file__, "--train", str(workers)],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    ).stdout
    found = dict(line.split() for line in said.splitlines() if line.startswith(("start", "bytes")))
    return float(found["start"]), int(found["bytes"]) / 2**20


def main() -> None:
    """Compare the two checkouts in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    if arguments.other is None:
        print("nothing to compare with: name the folder of another checkout")  # for `make bench`
        return
    for workers in (0, 4):
        pairs = [
            (measure(ROOT, workers), measure(arguments.other.resolve(), workers))
            for _ in range(arguments.pairs)
        ]
        for number, unit in enumerate(("s to the first step", "MiB of all processes")):
            here = [mine[number] for mine, _ in pairs]
            ratios = [mine[number] / before[number] for mine, before in pairs]
            print(
                f"{workers} workers a rank: {statistics.median(here):.4g} {unit} here, "
                f"{statistics.median(ratios):.3f} of the other ({min(ratios):.3f}.."
                f"{max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
