"""Processor time of commands of ``lightning-par``, in fresh processes.

    git worktree add ../before COMMIT && python benchmarks/command_start.py ../before

The processes of both checkouts take turns, so that both meet the same load. Printed are the medians
of user and system time together, in seconds, and of the paired ratios. ``import torch`` alone and
``import lightning.pytorch`` alone are there to compare with.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "--version",
    "--help",
    "schedule",
    "explain LP203",
    "plan --help",
    "search --help",
    "certificate --help",
    "backends",
    "fit --help",
)
IMPORTS = ("torch", "lightning.pytorch")


def seconds(words: list[str], checkout: Path) -> float:
    """Return the user and system time of a Python process that runs in a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    for name in IMPORTS:
        alone = [seconds(["-c", f"import {name}"], ROOT) for _ in range(given.pairs)]
        print(f"{f'import {name}':<28}{statistics.median(alone):>8.2f}")
    print(f"{'command':<20}{'there':>8}{'here':>8}{'ratio':>8}")
    for command in COMMANDS:
        words = ["-m", "lightning_par.cli", *command.split()]
        for checkout in (given.other, ROOT):  # writes bytecode, fills the cache of the files
            seconds(words, checkout)
        pairs = [(seconds(words, given.other), seconds(words, ROOT)) for _ in range(given.pairs)]
        there, here = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(f"{command:<20}{there:>8.2f}{here:>8.2f}{ratio:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
