"""Step time of this checkout against that of another one, such as an earlier commit.

    git worktree add ../before COMMIT && python benchmarks/against_checkout.py ../before

Both train the reference GPT at the same time, each in processes of its own, and take turns, block
of steps by block of steps: whatever else the machine does meets both. ``--muon`` trains all
matrices, with Muon. ``--verify SETTING`` is for this checkout alone, the other one proves nothing:
``--verify "every 100000" .`` tells what the proof costs steps that it does not compute again. The
names that are used here have to exist in both checkouts.
"""

import argparse
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "tp 2": (2, {**ONES, "tensor_parallel_size": 2}),
    "pp 2": (2, {**ONES, "pipeline_parallel_size": 2}),
    "dp 2, ZeRO 3": (2, {**ONES, "zero_stage": 3}),
    "dp 2, offloaded": (2, {**ONES, "zero_stage": 2, "offload_options": {}}),
    "cp 2": (2, {**ONES, "context_parallel_size": 2}),
    "tp 2 x pp 2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
WARMUP = 3  # blocks


def _make_turns(steps: int) -> Any:
    """Return a callback that waits for a line before each block of steps, and says its time."""
    import lightning.pytorch as pl  # in the process that trains alone

    class Turns(pl.Callback):
        began = 0.0

        def __deepcopy__(self, memo: dict[int, Any]) -> pl.Callback:
            """Return what takes no turns: the proof trains with copies of all callbacks."""
            return pl.Callback()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, index: int
        ) -> None:
            if trainer.global_rank == 0 and index % steps == 0:
                if index:
                    print("took", time.perf_counter() - self.began, _peak(), flush=True)
                sys.stdin.readline()
                self.began = time.perf_counter()

    return Turns()


def train(given: argparse.Namespace) -> None:
    """Train in one checkout; rank 0 waits for a line before each block, and then says its time."""
    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lightning_par import Hybrid3DStrategy
    from lightning_par.models import GPTModule

    class Matrices(GPTModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=1e-3)

    layout, steps, blocks = given.layout[0], given.steps, given.blocks
    torch.manual_seed(0)
    replicas = 2 if layout.startswith("dp") else 1
    rows = torch.randint(2048, (4 * replicas * (steps * blocks + 1), 129))
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    devices, options = LAYOUTS[layout]
    strategy = Hybrid3DStrategy(**options)
    chosen = getattr(strategy, "options", None)  # earlier commits have none
    if hasattr(chosen, "verify"):
        strategy.options = dataclasses.replace(chosen, verify=given.verify or False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision=given.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_make_turns(steps)],
    )
    sizes = {"vocab_size": 2048, "model_dim": 256, "num_heads": 8, "num_kv_heads": 4}
    module = (Matrices if given.muon else GPTModule)(overrides=sizes)
    trainer.fit(module, DataLoader(data, 4))  # type: ignore[arg-type]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Contender:
    """A checkout that trains when it is told to."""

    peak = 0.0
    """MiB that rank 0 has had resident at most."""

    def __init__(self, checkout: Path, given: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *given],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run_block(self) -> float:
        """Return the seconds of one block of steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                took, self.peak = map(float, line.split()[1:])
                return took
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")

    def close(self) -> None:
        """Let the last step run, and wait for the end."""
        self._process.communicate("\n")


def compare(layout: str, given: argparse.Namespace) -> None:
    """Print the ratio of the step times, this checkout over the other."""
    blocks = WARMUP + given.pairs
    same = ["--layout", layout, "--steps", str(given.steps), "--blocks", str(blocks)]
    same += ["--muon"] if given.muon else []
    same += ["--precision", given.precision]
    verify = ["--verify", given.verify] if given.verify else []
    ours, theirs = Contender(ROOT, [*same, *verify]), Contender(given.other.resolve(), same)
    times: list[tuple[float, float]] = []
    for block in range(blocks):
        if block % 2:  # who comes second may find the caches of the first
            mine, before = ours.run_block(), theirs.run_block()
        else:
            before, mine = theirs.run_block(), ours.run_block()
        times.append((mine, before))
    for contender in (ours, theirs):
        contender.close()
    ratios = sorted(mine / before for mine, before in times[WARMUP:])
    low, _, high = statistics.quantiles(ratios, n=4)
    milliseconds = statistics.median(mine for mine, _ in times[WARMUP:]) / given.steps * 1e3
    print(
        f"{layout:16} {statistics.median(ratios):.3f} ({low:.3f}..{high:.3f}), "
        f"{milliseconds:.1f} ms a step here, at most {ours.peak:.0f} MiB against {theirs.peak:.0f}",
        flush=True,
    )


def main() -> None:
    """Compare every layout, or train one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="folder of the other checkout")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--pairs", type=int, default=15, help="of blocks")
    parser.add_argument("--muon", action="store_true", help="train the matrices with Muon")
    parser.add_argument("--precision", default="32-true", help="of the Trainer, on both sides")
    parser.add_argument("--verify", help="what this checkout proves, such as 'every 100000'")
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.blocks is not None:
        train(arguments)
        return
    if arguments.other is None:
        print("nothing to compare with: name the folder of another checkout")  # for `make bench`
        return
    for layout in arguments.layout or LAYOUTS:
        compare(layout, arguments)


if __name__ == "__main__":
    main()
